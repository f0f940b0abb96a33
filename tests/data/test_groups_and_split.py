"""Group statistics by identity, and splits that lose nothing."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.data import (
    PackedBatch,
    Ragged,
    group_mean,
    group_standard_deviation,
    split_by_tokens,
    split_into_microbatches,
)

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=12)


@settings(max_examples=80)
@given(rows, st.randoms())
def test_statistics_count_episodes_not_trajectories(drawn: list[tuple[int, int, int]], random: object) -> None:
    """Groups are incomplete, shuffled, and an episode may have left several trajectories."""
    table = [(group, episode, float(7 * group + episode)) for group, episode, n in drawn for _ in range(n)]
    random.shuffle(table)  # type: ignore[attr-defined]
    episodes: dict[int, dict[int, float]] = defaultdict(dict)
    for group, episode, reward in table:
        episodes[group][episode] = reward
    batch = PackedBatch(
        Ragged(torch.ones(len(table), dtype=torch.int64), {"input_ids": torch.zeros(len(table), dtype=torch.int64)}),
        {
            "group_id": torch.tensor([row[0] for row in table]),
            "episode_id": torch.tensor([10 * row[0] + row[1] for row in table]),
        },
    )
    rewards = torch.tensor([row[2] for row in table])
    mean, deviation = group_mean(batch, rewards), group_standard_deviation(batch, rewards)
    for row, (group, _, _) in enumerate(table):
        values = list(episodes[group].values())
        assert math.isclose(float(mean[row]), statistics.fmean(values), abs_tol=1e-4)
        expected = statistics.stdev(values) if len(values) > 1 else 0.0
        assert math.isclose(float(deviation[row]), expected, abs_tol=1e-4)


def test_an_episode_counts_with_the_mean_of_its_trajectories_for_each_agent_by_itself() -> None:
    lengths = torch.ones(5, dtype=torch.int64)
    batch = PackedBatch(
        Ragged(lengths, {"input_ids": lengths}),
        {
            "group_id": torch.tensor([7, 7, 7, 7, 7]),
            "episode_id": torch.tensor([1, 1, 2, 1, 2]),
            "agent_id": torch.tensor([0, 0, 0, 9, 9]),
        },
    )
    rewards = torch.tensor([1.0, 3.0, 4.0, 10.0, 20.0])
    assert group_mean(batch, rewards).tolist() == [3.0, 3.0, 3.0, 15.0, 15.0]


lengths = st.lists(st.integers(1, 50), min_size=0, max_size=40)


@settings(max_examples=80)
@given(lengths, st.integers(1, 6))
def test_a_split_over_ranks_has_every_sequence_once_and_is_balanced(drawn: list[int], parts: int) -> None:
    shares = split_by_tokens(drawn, parts)
    assert sorted(index for share in shares for index in share) == list(range(len(drawn)))
    loads = [sum(drawn[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(drawn, default=0)


@settings(max_examples=80)
@given(lengths, st.integers(50, 120))
def test_microbatches_keep_to_the_budget(drawn: list[int], budget: int) -> None:
    bins = split_into_microbatches(drawn, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(drawn)))
    loads = [sum(drawn[i] for i in members) for members in bins]
    assert max(loads, default=0) <= budget
    assert max(loads, default=0) - min(loads, default=0) <= max(drawn, default=0)


def test_microbatches_are_alike_and_as_few_as_fit() -> None:
    assert split_into_microbatches([6, 6, 1], 12) == [[0, 2], [1]], "no small rest"
    assert split_into_microbatches([6, 6, 1], 13) == [[0, 1, 2]]
    assert split_into_microbatches([5, 5, 4, 4, 4], 12) == [[0, 4], [1], [2, 3]], "dealt out to two, they would be over"


def test_a_sequence_over_the_budget_is_a_microbatch_by_itself() -> None:
    assert split_into_microbatches([3, 11, 4], 10) == [[1], [0, 2]]
    assert split_into_microbatches([2, 50, 2, 1], 10) == [[1], [0, 2, 3]]
    assert split_into_microbatches([0], 10) == [[0]]
