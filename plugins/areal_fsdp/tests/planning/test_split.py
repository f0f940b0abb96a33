"""Micro-batches of padded rows fit the budget with their padding, and all ranks run the same number."""

import random

import pytest

from areal_fsdp.planning.split import Split

LENGTHS = [9, 30, 3, 12, 12, 1, 25, 7, 8]
ALONE = [[row] for row in range(len(LENGTHS))]


def plan(lengths, units, ranks, budget):
    options = {"ranks": ranks, "max_tokens": budget, "longest": None, "is_padded": True}
    return [Split.plan(lengths, units, rank=rank, **options) for rank in range(ranks)]


def padded(lengths, rows):
    return len(rows) * max(lengths[row] for row in rows)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [30, 40, 200])
def test_padding_counts_in_the_budget(ranks, budget):
    splits = plan(LENGTHS, ALONE, ranks, budget)
    parts = [part for split in splits for part in split.microbatches]
    assert sorted(row for part in parts for row in part) == list(range(len(LENGTHS)))
    assert all(padded(LENGTHS, part) <= budget for part in parts)
    assert len({split.rounds for split in splits}) == 1
    assert all(len(split.microbatches) <= split.rounds for split in splits)
    assert all(split.microbatches for split in splits)  # there are more sequences than ranks: none is idle


def test_a_unit_stays_whole_even_over_the_budget():
    (split,) = plan([4, 50, 6, 5], [[0, 1], [2, 3]], 1, 12)
    assert sorted(split.microbatches) == [[0, 1], [2, 3]]


def test_slots_include_padding():
    (split,) = plan([10, 9, 2], [[0], [1], [2]], 1, 20)
    assert split.slots == 2 * 10 + 2


def test_sequences_of_similar_length_share_a_micro_batch():
    """For random lengths, at most a tenth of the computed tokens is padding."""
    draws = random.Random(0)
    lengths = [draws.randint(1, 100) for _ in range(200)]
    (split,) = plan(lengths, [[row] for row in range(200)], 1, 400)
    assert split.slots < 1.1 * sum(lengths)
