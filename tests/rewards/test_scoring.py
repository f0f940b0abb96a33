"""The weighted sum of rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_core.rewards.scoring import RewardError, RewardSum, RewardTerm


def short(completion: str) -> float:
    return 1.0 / len(completion)


async def right(completion: str, answer: str) -> float:
    return float(answer in completion)


def test_every_reward_counts_with_its_weight() -> None:
    """Also where two have one name, which a config refuses."""
    arguments: dict[str, Any] = {"completion": "8888", "row": {"answer": "8"}}
    plain = RewardSum([RewardTerm("short", short), RewardTerm("short", short, 2.0)])
    assert plain(arguments).value == 0.75
    mixed = RewardSum([RewardTerm("short", short, 2.0), RewardTerm("right", right, 0.5)])
    score = asyncio.run(mixed.score(arguments))
    assert (score.value, score.components) == (1.0, {"short": 0.25, "right": 1.0})
    assert (plain.max_concurrency, mixed.max_concurrency) == (1, 32)


def test_an_argument_with_a_default_is_passed_where_it_is_offered() -> None:
    """Else the reward would be a constant; a keyword with a default is a setting, whatever a row has."""

    def exact(completion: str, answer: str = "", *, bonus: float = 1.0) -> float:
        return bonus * (completion == answer)

    both = {"completion": "8", "row": {"answer": "8", "bonus": 5.0}}
    assert RewardSum([RewardTerm("exact", exact)])(both).value == 1.0
    assert RewardSum([RewardTerm("exact", exact)])({"completion": "8", "row": {}}).value == 0.0


def test_a_reward_that_raises_is_told_with_its_line() -> None:
    with pytest.raises(
        RewardError, match=r"reward 'never' raised ZeroDivisionError: division by zero \(test_scoring.py:\d+\)"
    ):
        RewardSum([RewardTerm("never", lambda completion: 1 / 0)])({"completion": "8", "row": {}})
