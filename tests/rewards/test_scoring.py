"""The weighted sum of rewards."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward


def short(completion: str) -> float:
    return 1.0 / len(completion)


async def right(completion: str, answer: str) -> float:
    return float(answer in completion)


def test_every_reward_counts_with_its_weight() -> None:
    """Also where two have one name, which a config refuses."""
    arguments: dict[str, Any] = {"completion": "8888", "row": {"answer": "8"}}
    plain = RewardSum([WeightedReward("short", short), WeightedReward("short", short, 2.0)])
    assert plain(arguments).value == 0.75
    mixed = RewardSum([WeightedReward("short", short, 2.0), WeightedReward("right", right, 0.5)])
    score = asyncio.run(mixed.score(arguments))
    assert (score.value, score.components) == (1.0, {"short": 0.25, "right": 1.0})
    assert (plain.max_concurrency, mixed.max_concurrency) == (1, 32)


def test_an_argument_with_a_default_is_passed_where_it_is_offered() -> None:
    """Else the reward would be a constant; a keyword with a default is a setting, whatever a row has."""

    def exact(completion: str, answer: str = "", *, bonus: float = 1.0) -> float:
        return bonus * (completion == answer)

    both = {"completion": "8", "row": {"answer": "8", "bonus": 5.0}}
    assert RewardSum([WeightedReward("exact", exact)])(both).value == 1.0
    assert RewardSum([WeightedReward("exact", exact)])({"completion": "8", "row": {}}).value == 0.0


def test_a_reward_that_takes_any_argument_still_gets_what_it_names() -> None:
    """As rewards of TRL and AReaL are written; the rest is what areal offers, and the row as a whole."""

    def exact(completion: str, answer: str, *, bonus: float = 1.0, **others: Any) -> float:
        assert set(others) == {"prompt", "row"}
        return bonus * (completion == answer)

    arguments = {"prompt": "4 + 4 =", "completion": "8", "row": {"answer": "8", "bonus": 5.0, "difficulty": 2}}
    assert RewardSum([WeightedReward("exact", exact)])(arguments).value == 1.0


def test_an_argument_of_rewards_that_a_workflow_does_not_pass_is_no_unknown_name() -> None:
    def exact(completion: str, prompt_ids: list[int]) -> float:
        return 1.0

    def right(completion: str, solution: str) -> float:
        return 1.0

    arguments = {"completion": "8", "row": {"answer": "8"}}
    message = r"reward 'exact' needs 'prompt_ids', which is not passed here: .* with completion, row"
    with pytest.raises(RewardError, match=message):
        RewardSum([WeightedReward("exact", exact)])(arguments)
    message = r"'solution', which is neither an argument of rewards \(prompt, .*, row\) nor a key .* \(answer\)"
    with pytest.raises(RewardError, match=message):
        RewardSum([WeightedReward("right", right)])(arguments)


def test_a_reward_that_raises_is_told_with_its_line() -> None:
    with pytest.raises(
        RewardError, match=r"reward 'never' raised ZeroDivisionError: division by zero \(test_scoring.py:\d+\)"
    ):
        RewardSum([WeightedReward("never", lambda completion: 1 / 0)])({"completion": "8", "row": {}})


def test_what_a_helper_raises_is_told_with_the_rewards_own_line_too() -> None:
    def half(text: str) -> float:
        return 1 / int(text)

    def never(completion: str) -> float:
        return half(completion)

    told = r"division by zero \(test_scoring.py:(\d+), called from test_scoring.py:(\d+)\)$"
    with pytest.raises(RewardError, match=told) as caught:
        RewardSum([WeightedReward("never", never)])({"completion": "0", "row": {}})
    found = re.search(told, str(caught.value))
    assert found is not None
    assert int(found[2]) - int(found[1]) == 3
