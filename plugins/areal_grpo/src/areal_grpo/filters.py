"""Filters: which finished groups are worth training on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def zero_variance(rewards: Sequence[float]) -> bool:
    """False where all rewards are equal: every advantage would be 0 (dynamic sampling of DAPO, arXiv 2503.14476)."""
    return any(reward != rewards[0] for reward in rewards)
