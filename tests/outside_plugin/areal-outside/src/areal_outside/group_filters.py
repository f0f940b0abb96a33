"""A group filter: the episodes of one prompt, or None to drop them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


def not_solved(episodes: Sequence[Episode], *, share: float) -> Sequence[Episode] | None:
    """None where more than `share` of the answers are right."""
    right = sum(episode.reward > 0 for episode in episodes)
    return None if right > share * len(episodes) else episodes
