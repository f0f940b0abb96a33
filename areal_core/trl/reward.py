"""Reward functions of TRL, which take lists, as rewards of areal, which score one answer.

TRL calls a function once for a whole batch. areal calls it for each answer, as soon as that has been generated, with
lists of one entry.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

from areal_core.config.imports import import_reference

NOT_PASSED: Final = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL's reward functions that areal has no equal of."""
_NO_COLUMNS: Final = ("prompt", "completion", "completion_ids")


class Reward:
    """A reward function of TRL.

    Args:
        function: its name, as `file:attr`.
    """

    def __init__(self, function: str) -> None:
        self._function: Any = import_reference(function, Path.cwd()).value

    def __call__(self, row: dict[str, Any], completion: str, completion_ids: list[int]) -> float | None:
        """Return the reward of one answer, or None to abstain."""
        return _only(self._function(**_arguments(row, completion, completion_ids)))


class AsyncReward(Reward):
    """A reward function of TRL that is a coroutine function."""

    async def __call__(  # type: ignore[override]
        self, row: dict[str, Any], completion: str, completion_ids: list[int]
    ) -> float | None:
        """Return the reward of one answer, or None to abstain."""
        return _only(await self._function(**_arguments(row, completion, completion_ids)))


def _arguments(row: dict[str, Any], completion: str, completion_ids: list[int]) -> dict[str, Any]:
    """Return the arguments of TRL's functions. If the prompt is a list of messages, the answer is one, too."""
    is_conversation = not isinstance(row["prompt"], str)
    answer = [{"role": "assistant", "content": completion}] if is_conversation else completion
    columns = {name: [value] for name, value in row.items() if name not in _NO_COLUMNS}
    return {"prompts": [row["prompt"]], "completions": [answer], "completion_ids": [completion_ids], **columns}


def _only(rewards: Any) -> float | None:
    values = list(rewards)
    if len(values) != 1:
        raise ValueError(f"it returned {len(values)} rewards for 1 completion: it must return one for each")
    value: float | None = values[0]
    return value


def not_passed(function: Any) -> list[str]:
    """Return the names of arguments that a function of TRL requires and areal does not pass."""
    parameters = inspect.signature(function).parameters
    return [name for name in NOT_PASSED if name in parameters and parameters[name].default is inspect.Parameter.empty]
