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
