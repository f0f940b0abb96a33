"""Planners are compared with planners and solvers with solvers."""

import numpy as np
import pytest

from areal_core.data import Episode, FinishReason, PackedBatch, Trajectory, TrajectoryBuilder, group_mean
from areal_core.data.packing import pack_group
from areal_core.data.trajectory import Generation
from areal_grpo.advantages import group_normalized
from areal_grpo.generalized_advantages import reinforce_pp
from areal_grpo.group_filters import zero_variance
from areal_grpo.reward_shaping import overlong_penalty


def episode(planner: float, solver: float) -> Episode:
    trajectories = []
    for agent_id, earned in (("planner", planner), ("solver", solver)):
        builder = TrajectoryBuilder()
        builder.add_context([1])
        builder.add_generation(Generation([5, 6], [-0.1, -0.1], [0, 0], FinishReason.STOP))
        trajectories.append(builder.build(agent_id=agent_id, reward=earned))
    return Episode(trajectories, 0.0)


EPISODES = {0: episode(0, 10), 1: episode(1, 10), 2: episode(0, 10)}


def test_agents_are_compared_with_their_like():
    batch = PackedBatch.from_columns(pack_group(0, (0, 0), 3, EPISODES))
    assert batch["reward"].tolist() == [0, 10, 1, 10, 0, 10]
    assert group_mean(batch, batch["reward"].double()).tolist() == pytest.approx([1 / 3, 10] * 3)
    advantages = group_normalized(batch, epsilon=1e-6)
    assert advantages[1::2].abs().max() == 0, "all solvers did as well as one another"
    assert advantages[2] > 0 > advantages[0]


def test_a_reward_goes_to_the_agent_that_earned_it():
    batch = PackedBatch.from_columns(pack_group(0, (0, 0), 3, EPISODES))
    advantages = reinforce_pp(batch, gamma=1.0).view(6, 3)[:, 1:]
    assert (advantages[1::2] > advantages[::2].max()).all(), "solvers earned more than planners, token for token"
    assert advantages[2].min() > advantages[0].max()


def test_group_filters_see_rewards_of_agents():
    same = [EPISODES[0], EPISODES[2]]
    assert zero_variance([*EPISODES.values()]) is not None, "the planners differ"
    assert zero_variance(same) is None
    penalized = overlong_penalty(same, max_length=4, buffer=4, factor=0.5)
    assert pack_group(0, (0, 0), 2, dict(enumerate(penalized)))["sequences.reward"].tolist() == [-0.5, 9.5, -0.5, 9.5]


def test_group_filters_see_rewards_of_tokens():
    """One answer has the token reward that the other lacks: there is something to learn."""
    same = [EPISODES[0], EPISODES[2]]
    planner, solver = same[0].trajectories
    richer = Trajectory(
        {**planner.tokens, "token_rewards": np.array([0, 1, 0], np.float32)}, planner.sequence, agent_id="planner"
    )
    assert zero_variance([Episode([richer, solver], 0.0), same[1]]) is not None


def test_every_trajectory_of_an_agent_counts_in_what_it_earned():
    """As in the statistics of a group: the mean of them, not the last one alone."""

    def played(first: float, last: float) -> Episode:
        solvers = [episode(0, reward).trajectories[1] for reward in (first, last)]
        return Episode(solvers, 0.0)

    batch = PackedBatch.from_columns(pack_group(0, (0, 0), 2, {0: played(3, 1), 1: played(0, 1)}))
    advantages = reinforce_pp(batch, gamma=1.0).view(4, 3)[:, 1:]
    assert advantages[:2].min() > advantages[2:].max()
