"""A reward: a plain function that names what it wants to know, and then its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def brevity(completion_ids: Sequence[int], finish_reason: str, *, free_tokens: int) -> float:
    """1 up to `free_tokens` tokens, then less and less; 0 for an answer that was cut off."""
    if finish_reason != "stop":
        return 0.0
    return min(1.0, (free_tokens + 1) / (len(completion_ids) + 1))
