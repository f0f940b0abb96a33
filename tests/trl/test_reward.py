"""Functions of TRL as rewards of areal: what they are called with, and what they return."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward, reward_parameters
from areal_core.trl.reward import AsyncReward, Reward

SEEN: list[dict[str, Any]] = []


def plain(prompts, completions, completion_ids, answer, **kwargs):  # type: ignore[no-untyped-def]
    SEEN.append({"prompts": prompts, "completions": completions, "ids": completion_ids, "answer": answer, **kwargs})
    return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]


async def waits(completions, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return [None for _ in completions]


def too_many(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0, 2.0]


def score(function: str, row: dict[str, Any], kind: type[Reward] = Reward) -> Any:
    made = kind(f"{__file__}:{function}")
    total = RewardSum([WeightedReward("own", made), WeightedReward("base", lambda completion: 10.0)])
    arguments = {"row": row, "completion": "8", "completion_ids": [5, 2], "prompt": "rendered", "finish_reason": "stop"}
    if kind is AsyncReward:
        return asyncio.run(total.score(arguments))
    return total(arguments)


def test_lists_of_one_with_the_columns_of_the_row() -> None:
    result = score("plain", {"prompt": "4+4=", "answer": "8", "level": 3})
    assert dict(result.components) == {"own": 1.0, "base": 10.0}
    assert _last() == {
        "prompts": ["4+4="], "completions": ["8"], "ids": [[5, 2]], "answer": ["8"], "level": [3],
    }  # fmt: skip


def test_a_conversation_is_answered_by_a_message() -> None:
    messages = [{"role": "user", "content": "4+4="}]
    score("plain", {"prompt": messages, "answer": "8"})
    assert _last()["prompts"] == [messages]
    assert _last()["completions"] == [[{"role": "assistant", "content": "8"}]]


def test_none_abstains_also_in_a_coroutine() -> None:
    result = score("waits", {"prompt": "a"}, AsyncReward)
    assert (result.value, dict(result.components)) == (10.0, {"base": 10.0})


def test_another_number_of_rewards_is_an_error() -> None:
    with pytest.raises(RewardError, match="it returned 2 rewards for 1 completion"):
        score("too_many", {"prompt": "a"})


def test_what_areal_must_pass() -> None:
    assert reward_parameters(Reward(f"{__file__}:plain")) == (
        {"row": True, "completion": True, "completion_ids": True},
        False,
    )


def _last() -> dict[str, Any]:
    """What `plain` saw last, in the module as the reward has imported it."""

    module = next(
        m for name, m in sys.modules.items() if name.startswith("areal_core.files.") and name.endswith("test_reward")
    )
    found: dict[str, Any] = module.SEEN[-1]
    return found
