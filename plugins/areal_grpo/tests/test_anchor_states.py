"""GiGPO against loops over dictionaries, written from the paper, and against values worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import PackedBatch, Ragged, shift_to_predictions
from areal_core.errors import ConfigError
from areal_grpo.anchor_states import gigpo

SETTINGS = {"step_weight": 0.7, "gamma": 0.9, "normalization": "std", "epsilon": 1e-6}


def make(episodes, turn_rewards=True):
    """Return a shifted batch. An episode: group, number, reward, and for each turn (observation, action, reward)."""
    tokens = {"input_ids": [], "loss_mask": [], "turn_ids": []}
    lengths, rewards, turns = [], [], []
    for episode in episodes:
        begin = len(tokens["input_ids"])
        for number, (observation, action, reward) in enumerate(episode["turns"]):
            tokens["input_ids"] += [*observation, *action]
            tokens["loss_mask"] += [False] * len(observation) + [True] * len(action)
            tokens["turn_ids"] += [-1] * len(observation) + [number] * len(action)
            rewards.append(reward)
        lengths.append(len(tokens["input_ids"]) - begin)
        turns.append(len(episode["turns"]))
    columns = {key: torch.tensor(value) for key, value in tokens.items()}
    sequences = {
        "reward": torch.tensor([float(episode["reward"]) for episode in episodes], dtype=torch.float64),
        "group_id": torch.tensor([episode["group"] for episode in episodes]),
        "episode_id": torch.arange(len(episodes)) + 50,
    }
    of_turns = Ragged(torch.tensor(turns), {"turn_rewards": torch.tensor(rewards, dtype=torch.float64)})
    batch = PackedBatch(Ragged(torch.tensor(lengths), columns), sequences, of_turns if turn_rewards else None)
    return shift_to_predictions(batch)


def mean(numbers):
    return sum(numbers) / len(numbers)


def compared(value, numbers, epsilon, *, normalized=True):
    center = mean(numbers)
    spread = math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0
    return (value - center) / (spread + epsilon) if normalized else value - center


def by_hand(episodes, *, step_weight, gamma, normalization, epsilon):
    """The advantage of each turn of each episode."""
    is_normalized, states = normalization == "std", {}
    for episode in episodes:
        own = [reward for _, _, reward in episode["turns"]]
        own[-1] += episode["reward"] - sum(own)
        episode["returns"] = [sum(gamma ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))]
        for (observation, _, _), value in zip(episode["turns"], episode["returns"], strict=True):
            states.setdefault((episode["group"], tuple(observation)), []).append(value)
    found = []
    for episode in episodes:
        siblings = [other["reward"] for other in episodes if other["group"] == episode["group"]]
        whole = compared(episode["reward"], siblings, epsilon, normalized=is_normalized)
        for (observation, _, _), value in zip(episode["turns"], episode["returns"], strict=True):
            at_state = states[episode["group"], tuple(observation)]
            found.append(whole + step_weight * compared(value, at_state, epsilon, normalized=is_normalized))
    return found


def by_turn(batch, advantages):
    """The advantage of each turn; it is the same for all its tokens."""
    found = []
    for row in range(len(batch)):
        places = range(*batch.tokens.offsets[row : row + 2].tolist())
        for turn in sorted({int(batch["turn_ids"][t]) for t in places} - {-1}):
            (value,) = {float(advantages[t]) for t in places if int(batch["turn_ids"][t]) == turn}
            found.append(value)
    return found


@st.composite
def drawn(draw):
    observation = st.lists(st.integers(0, 2), min_size=1, max_size=2)
    action = st.lists(st.integers(5, 7), min_size=1, max_size=3)
    turn = st.tuples(observation, action, st.floats(-2, 2, width=16))
    return [
        {
            "group": 10 * group,
            "reward": draw(st.floats(-2, 2, width=16)),
            "turns": draw(st.lists(turn, min_size=1, max_size=4)),
        }
        for group in range(draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 4)))
    ]  # fmt: skip


@pytest.mark.parametrize("normalization", ["std", "none"])
@given(episodes=drawn())
def test_advantages_are_those_of_the_loop(episodes, normalization):
    settings = {**SETTINGS, "normalization": normalization}
    batch = make(episodes)
    advantages = gigpo(batch, **settings)
    wanted = by_hand(episodes, **settings)
    # Rewards that differ by less than epsilon give large quotients of rounding errors.
    assert by_turn(batch, advantages) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert not advantages[~batch["loss_mask"]].any()


def test_a_masked_first_token_does_not_hide_the_state():
    episodes = [{"group": 1, "reward": r, "turns": [([1, 2], [5, 6, 7], 0.0), ([3], [5, 6], 0.0)]} for r in (1.0, 0.0)]
    batch = make(episodes)
    whole = gigpo(batch, **SETTINGS)
    mask = batch["loss_mask"].clone()
    mask[mask.nonzero()[0, 0]] = False
    masked = gigpo(batch.with_tokens(loss_mask=mask), **SETTINGS)
    torch.testing.assert_close(masked[mask], whole[mask])


def test_values_worked_by_hand():
    """With γ = 0.95 and a reward of 10 after two turns the returns are 9.5 and 10; the other episode has 0 and 0. Two
    turns of a state with returns a > b have (a - b) / 2 over the unbiased std (a - b) / √2: ± 1 / √2.
    """
    episodes = [{"group": 1, "reward": r, "turns": [([1], [5], 0.0), ([2], [6], r)]} for r in (10.0, 0.0)]
    batch = make(episodes)
    advantages = by_turn(batch, gigpo(batch, **{**SETTINGS, "gamma": 0.95, "step_weight": 1.0}))
    assert advantages == pytest.approx([2**0.5, 2**0.5, -(2**0.5), -(2**0.5)], abs=1e-5)


def test_a_single_turn_is_refused(read):
    with pytest.raises(
        ConfigError, match=r"gigpo compares the turns of episodes, but the workflow single_turn has one"
    ):
        read("algorithm.advantage=gigpo")
