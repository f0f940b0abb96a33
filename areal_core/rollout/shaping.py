"""What an algorithm's group stages make of a prompt group that has ended."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.rollout.clocks import was_cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config.sections import RolloutSection
    from areal_core.data.trajectory import Episode
    from areal_core.interfaces.algorithm import GroupStage
    from areal_core.rollout.checks import EpisodeChecks


async def shape(
    number: int,
    episodes: Sequence[Episode],
    stages: Sequence[GroupStage],
    checks: EpisodeChecks,
    section: RolloutSection,
) -> Sequence[Episode] | None:
    """Filter and shape a group; its episodes, or None where it is not to be trained on.

    Args:
        number: of the group.
        episodes: that ended well.
        stages: in order.
        checks: what is asked of every episode.
        section: each stage may take as long as an episode.

    Raises:
        RunError: a stage raised, took too long, or returned what is no group; with its traceback.
    """
    try:
        for stage in stages:
            found = stage(episodes)
            if inspect.isawaitable(found):
                async with asyncio.timeout(section.episode_timeout_s):
                    found = await found
            if found is None:
                return None
            if len(found) != len(episodes):
                raise ValueError(f"{stage} returned {len(found)} episodes for {len(episodes)}")
            episodes = [checks.check(episode) for episode in found]
    except BaseException as error:  # a stage may raise anything
        if isinstance(error, asyncio.CancelledError) and was_cancelled():
            raise
        told = "".join(traceback.format_exception(error))
        raise RunError(f"the algorithm's group stages failed on prompt group {number}:\n{told}") from error
    return episodes
