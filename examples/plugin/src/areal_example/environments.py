"""An environment: the other side of a conversation. Each episode has an object of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from areal_core.plugins import register
from areal_core.sdk import StepResult
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Mapping


@register("environments")
class SecondChances:
    """Says whether an answer is right, and lets the policy try again."""

    def __init__(self, tries: Annotated[int, Field(ge=1, description="Maximum number of answers.")] = 3) -> None:
        self._left = tries
        self._answer = ""

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Open with the question of the row."""
        self._answer = str(row["answer"])
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, completion: str) -> StepResult:
        """Reward the right answer, and end when the tries are used up."""
        self._left -= 1
        if completion.strip() == self._answer:
            return StepResult(reward=1.0, terminated=True)
        return StepResult("Wrong. Try again.") if self._left > 0 else StepResult(truncated=True)
