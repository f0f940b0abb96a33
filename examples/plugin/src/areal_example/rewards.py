"""A reward: a plain function that names what it wants to know, and then its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from areal_core.plugins import register
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Sequence


@register("reward_functions")
def brevity(
    completion_ids: Sequence[int],
    finish_reason: str,
    *,
    free_tokens: Annotated[
        int, Field(ge=0, description="Maximum length of an answer, in tokens, that gets a reward of 1.")
    ] = 10,
) -> float:
    """Reward short answers that end by themselves: 1 up to `free_tokens` tokens, then less and less."""
    if finish_reason != "stop":
        return 0.0
    return min(1.0, (free_tokens + 1) / (len(completion_ids) + 1))
