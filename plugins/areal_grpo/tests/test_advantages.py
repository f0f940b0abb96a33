"""Advantages against loops over episodes that are written from the papers, and against TRL's tensor formulas."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_grpo.advantages import group_centered, group_normalized, leave_one_out

EPSILON = 1e-6


def rewards_of_group(rows, group):
    """The rewards of a group's episodes, one each, however many trajectories they left."""
    return list({episode: reward for reward, number, episode in rows if number == group}.values())


def normalized(reward, siblings):
    mean = sum(siblings) / len(siblings)
    if len(siblings) == 1:
        return 0.0
    deviation = math.sqrt(sum((other - mean) ** 2 for other in siblings) / (len(siblings) - 1))
    return (reward - mean) / (deviation + EPSILON)


def centered(reward, siblings):
    return reward - sum(siblings) / len(siblings)


def without_itself(reward, siblings):
    others = list(siblings)
    others.remove(reward)
    return reward - sum(others) / len(others) if others else 0.0


PAIRS = [
    (partial(group_normalized, epsilon=EPSILON), normalized),
    (group_centered, centered),
    (leave_one_out, without_itself),
]
each_advantage = pytest.mark.parametrize(("advantage", "naive"), PAIRS, ids=["normalized", "centered", "leave_one_out"])


def compare(advantage, naive, rows, make_batch):
    batch = make_batch([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    expected = [naive(reward, rewards_of_group(rows, group)) for reward, group, _ in rows]
    found = advantage(batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@each_advantage
@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 7, 0), (0.0, 7, 1), (0.0, 7, 2), (2.0, 9, 3), (1.0, 9, 4), (4.0, 9, 5)],
        [(1.0, 7, 0), (2.0, 9, 3), (0.0, 7, 1), (1.0, 9, 4), (0.5, 9, 5)],
        [(1.0, 7, 0), (3.0, 9, 3), (1.0, 9, 4)],
        [(1.0, 7, 0), (1.0, 7, 0), (1.0, 7, 0), (0.0, 7, 1), (0.5, 7, 2), (0.5, 7, 2)],
    ],
    ids=["complete", "incomplete and interleaved", "group of one", "several trajectories an episode"],
)
def test_the_loop_of_the_paper(advantage, naive, rows, make_batch):
    compare(advantage, naive, rows, make_batch)


@st.composite
def batches(draw):
    """Rows (reward, group, episode): groups of any size, episodes of one to three trajectories, in any order."""
    rows, episode = [], 100
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 5))):
            reward = draw(st.floats(-3, 3, width=16))
            rows += [(reward, 10 * group, episode)] * draw(st.integers(1, 3))
            episode += 1
    return draw(st.permutations(rows))


@each_advantage
@given(rows=batches())
def test_any_groups_in_any_order(advantage, naive, rows, make_batch):
    batch = make_batch([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    expected = torch.tensor([naive(reward, rewards_of_group(rows, group)) for reward, group, _ in rows])
    torch.testing.assert_close(advantage(batch), expected, rtol=1e-4, atol=1e-4)


@each_advantage
def test_equal_rewards_teach_nothing_whatever_their_rounding(advantage, naive, make_batch):
    batch = make_batch([0.1] * 7, [0] * 7)
    assert advantage(batch).abs().max() < 1e-7


def test_trl_on_complete_groups(make_batch):
    """TRL's GRPOTrainer and RLOOTrainer reshape to [prompts, G], which is right for complete groups in order."""
    size, rewards = 4, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.2, 0.4, 0.1, 0.9, 1.0, 0.0, 0.0, 0.0])
    batch = make_batch(rewards.tolist(), [row // size for row in range(len(rewards))])
    grouped = rewards.view(-1, size)
    mean = grouped.mean(dim=1).repeat_interleave(size)
    deviation = grouped.std(dim=1).repeat_interleave(size)
    torch.testing.assert_close(group_normalized(batch, epsilon=1e-4), (rewards - mean) / (deviation + 1e-4))
    torch.testing.assert_close(group_centered(batch), rewards - mean)
    baselines = (grouped.sum(dim=1, keepdim=True) - grouped) / (size - 1)
    torch.testing.assert_close(leave_one_out(batch), rewards - baselines.flatten())
