"""Group stages: what becomes of a finished group before it is trained on. Pure functions of its episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


def zero_variance(episodes: Sequence[Episode]) -> Sequence[Episode] | None:
    """Drops a group whose rewards are all equal: all advantages would be 0 (dynamic sampling, arXiv 2503.14476)."""
    return episodes if any(episode.reward != episodes[0].reward for episode in episodes) else None
