"""Token ids that grow, and their JSON, which is written once."""

from __future__ import annotations

import json

import pytest

from areal_core.data import SampledTokens, TokenIds


def test_json_is_that_of_all_of_them_however_they_came() -> None:
    ids = TokenIds()
    assert bytes(ids.json()) == b"[]"
    for more in ([7], [], [8, 9], [151_935]):
        ids.extend(more)
        assert json.loads(bytes(ids.json())) == json.loads(bytes(ids.json())) == ids.tolist()


def test_neither_the_first_ones_nor_what_follows_them_changes_the_other() -> None:
    first = TokenIds([1, 2])
    same, longer = TokenIds(first), first.followed_by([3])
    first.extend([4])
    same.extend([5])
    found = [first, same, longer]
    assert [ids.tolist() for ids in found] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]
    assert [json.loads(bytes(ids.json())) for ids in found] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]


def test_it_is_a_sequence() -> None:
    ids = TokenIds([5, -3, 9])
    assert (len(ids), ids[-1], ids[:2], [*ids], ids.bounds()) == (3, 9, [5, -3], [5, -3, 9], (-3, 9))
    assert ids == [5, -3, 9]
    assert ids == TokenIds([5, -3, 9])
    assert ids != TokenIds([5, -3])
    with pytest.raises(TypeError):
        TokenIds([1.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([], [], ""),
        ([1, 2], [-0.5, 0.001], ""),
        ([1], [], "1 tokens with 0 log-probabilities"),
        ([1, -2], [-1.0, -1.0], "-2 as a token"),
        ([1, 64], [-1.0, -1.0], "64 as a token of 64"),
        ([1], [0.02], "as a log-probability"),
        ([1, 2], [-1.0, float("nan")], "nan as a log-probability"),
        ([1, 2], [float("-inf"), -1.0], "-inf as a log-probability"),
    ],
)
def test_what_nobody_has_sampled_is_told(ids: list[int], logprobs: list[float], message: str) -> None:
    found = SampledTokens(ids, logprobs).fault(64)
    assert message in found
    assert bool(message) == bool(found)


@pytest.mark.parametrize(
    ("tops", "requested", "message"),
    [
        (([], []), None, ""),
        (([3, 4, 5, 6], [-0.5, -3.0, -0.5, -9999.0]), 2, ""),
        (([3, 4, 5, 6], [-0.5, -3.0, -0.5, float("-inf")]), 2, "-inf as the log-probability of one of the likeliest"),
        (([3, 4, 5, 6], [-0.5, -3.0, -0.5, -3.0]), None, ""),
        (([], []), 2, "0 likeliest tokens and 0 of their log-probabilities for 2 tokens, instead of 4 each"),
        (([3, 4, 5], [-0.5, -3.0, -0.5]), 2, "3 likeliest tokens and 3"),
        (([3, 4, 5], [-0.5, -3.0, -0.5]), None, "3 likeliest tokens and 3"),
        (([3, 4, 5, 6], [-0.5, -3.0]), 2, "4 likeliest tokens and 2"),
        (([3, 4], [-0.5, -3.0]), 0, "2 likeliest tokens and 2 of their log-probabilities for 2 tokens, instead of 0"),
        (([3, 64, 5, 6], [-0.5, -3.0, -0.5, -3.0]), 2, "64 as one of the likeliest tokens"),
        (([3, -1, 5, 6], [-0.5, -3.0, -0.5, -3.0]), 2, "-1 as one of the likeliest tokens"),
        (([3, 4, 5, 6], [-0.5, -3.0, -0.5, float("nan")]), 2, "nan as the log-probability of one of the likeliest"),
        (([3, 4, 5, 6], [-0.5, -0.5, -0.5, -3.0]), 2, "1.21306 as the probability of the 2 likeliest tokens"),
    ],
)
def test_impossible_likeliest_tokens_are_a_fault(
    tops: tuple[list[int], list[float]], requested: int | None, message: str
) -> None:
    found = SampledTokens([1, 2], [-1.0, -1.0], [0, 0], *tops).fault(64, requested)
    assert message in found
    assert bool(message) == bool(found)


def test_the_first_tokens_have_their_own_likeliest_tokens() -> None:
    whole = SampledTokens([1, 2, 3], [-1.0, -2.0, -3.0], [7, 7, 8], [9, 8, 7, 6, 5, 4], [-1.0, -2.0] * 3)
    part = whole.first(2)
    assert (part.ids.tolist(), part.logprobs.tolist(), part.versions.tolist()) == ([1, 2], [-1.0, -2.0], [7, 7])
    assert (part.top_ids.tolist(), part.top_logprobs.tolist()) == ([9, 8, 7, 6], [-1.0, -2.0] * 2)
    assert part.top_count == 2
    assert len(whole.first(0).top_ids) == 0
