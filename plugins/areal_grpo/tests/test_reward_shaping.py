"""Reward shaping and group filters against their papers' formulas, episode by episode."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.rollout.checks import EpisodeChecks
from areal_grpo.group_filters import mask_truncated
from areal_grpo.reward_shaping import length_penalty, overlong_penalty, reward_bounds


def generation(length, reason=FinishReason.STOP):
    return Generation([5] * length, [-0.1] * length, [3] * length, reason)


def episode(length, reward, reason=FinishReason.STOP):
    return Episode(
        [Trajectory.from_generation([1, 2, 3], generation(length, reason))], reward, {"right": reward}, "text"
    )


GROUPS = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), min_size=1, max_size=6)


@given(group=GROUPS, buffer=st.integers(1, 10), factor=st.sampled_from([1.0, 0.3]))
def test_equation_13_of_dapo(group, buffer, factor):
    longest, found = 20, []
    for length, reward in group:
        if length <= longest - buffer:
            punishment = 0.0
        elif length <= longest:
            punishment = ((longest - buffer) - length) / buffer
        else:
            punishment = -1.0
        found.append(reward + factor * punishment)
    episodes = [episode(*each) for each in group]
    shaped = overlong_penalty(episodes, max_length=longest, buffer=buffer, factor=factor)
    assert [e.reward for e in shaped] == pytest.approx(found, abs=1e-12)
    assert [e.reward for e in episodes] == [reward for _, reward in group]
    assert all(
        e.rewards == {"right": reward} and e.text == "text" for e, (_, reward) in zip(shaped, group, strict=True)
    )


@given(group=GROUPS, coefficient=st.sampled_from([1.0, 0.2]))
def test_the_length_penalty_of_kimi(group, coefficient):
    shortest, longest = min(length for length, _ in group), max(length for length, _ in group)
    found = []
    for length, reward in group:
        share = 0.0 if longest == shortest else 0.5 - (length - shortest) / (longest - shortest)
        found.append(reward + coefficient * (share if reward > 0 else min(0.0, share)))
    shaped = length_penalty([episode(*each) for each in group], coefficient=coefficient, right_above=0.0)
    assert [e.reward for e in shaped] == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.0, 1.0, [0.0, 0.5, 1.0]), (None, 0.2, [-3.0, 0.2, 0.2]), (0.1, None, [0.1, 0.5, 7.0])],
)
def test_bounds(low, high, wanted):
    shaped = reward_bounds([episode(1, reward) for reward in (-3.0, 0.5, 7.0)], low=low, high=high)
    assert [e.reward for e in shaped] == wanted


def test_the_length_is_what_was_sampled_in_all_trajectories():
    """Prompts and tools' answers do not count; tokens that a filter has taken out of the loss do."""
    parts = [episode(4, 0.0).trajectories[0], episode(3, 0.0, FinishReason.LENGTH).trajectories[0]]
    several = Episode(parts, 1.0)
    settings = {"max_length": 10, "buffer": 10, "factor": 1.0}
    assert overlong_penalty([several], **settings)[0].reward == pytest.approx(1 - 0.7)
    (masked,) = mask_truncated([several])
    assert overlong_penalty([masked], **settings)[0].reward == pytest.approx(1 - 0.7)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_what_was_cut_off_leaves_the_loss(reason):
    group = [episode(30, 1.0), episode(5, 0.0, reason), episode(2, 0.5, FinishReason.TOOL)]
    shaped = mask_truncated(group)
    assert [int(e.trajectories[0].tokens["loss_mask"].sum()) for e in shaped] == [30, 0, 2]
    assert [int(e.trajectories[0].tokens["loss_mask"].sum()) for e in group] == [30, 5, 2]
    assert [e.reward for e in shaped] == [1.0, 0.0, 0.5]
    for before, after in zip(group, shaped, strict=True):
        EpisodeChecks().check(after)
        for key in ("input_ids", "logprobs", "versions", "turn_ids"):
            assert np.array_equal(before.trajectories[0].tokens[key], after.trajectories[0].tokens[key])


def test_a_group_of_nothing_but_cut_off_answers_is_dropped():
    assert mask_truncated([episode(3, 1.0, FinishReason.LENGTH), episode(2, 0.0, FinishReason.ABORT)]) is None


def test_only_the_trajectory_that_was_cut_off_is_masked():
    parts = [episode(4, 0.0).trajectories[0], episode(3, 0.0, FinishReason.LENGTH).trajectories[0]]
    (shaped,) = mask_truncated([Episode(parts, 1.0)])
    assert [int(t.tokens["loss_mask"].sum()) for t in shaped.trajectories] == [4, 0]
