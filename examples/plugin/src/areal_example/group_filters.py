"""A group filter: which prompts are trained on. A pure function of the answers to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from areal_core.plugins import register
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


@register("group_filters")
def not_solved(
    episodes: Sequence[Episode],
    *,
    share: Annotated[
        float, Field(gt=0, le=1, description="Drop a prompt if a larger share of its answers is correct.")
    ] = 0.9,
) -> Sequence[Episode] | None:
    """Leave out prompts that the policy solves nearly always: they teach it little."""
    right = sum(episode.reward > 0 for episode in episodes)
    return None if right > share * len(episodes) else episodes
