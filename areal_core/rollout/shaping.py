"""Applies the algorithm's reward shaping and group filters to a prompt group that has ended."""

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
    from areal_core.interfaces.algorithm import GroupFilter
    from areal_core.rollout.checks import EpisodeChecks


async def shape(
    number: int,
    episodes: Sequence[Episode],
    filters: Sequence[GroupFilter],
    checks: EpisodeChecks,
    section: RolloutSection,
) -> Sequence[Episode] | None:
    """Return the shaped episodes of a group, or None if a filter drops the group.

    Args:
        number: of the group.
        episodes: those that did not fail.
        filters: reward shaping, then group filters.
        checks: applied to every episode that a filter returns.
        section: `rollout` of the config; a filter may take as long as an episode.

    Raises:
        RunError: a filter raised, took too long, or returned another number of episodes; with its traceback.
    """
    try:
        for filtering in filters:
            found = filtering([*episodes])
            if inspect.isawaitable(found):
                async with asyncio.timeout(section.episode_timeout_s):
                    found = await found
            if found is None:
                return None
            if len(found) != len(episodes):
                raise ValueError(
                    f"{getattr(filtering, '__name__', filtering)} returned {len(found)} episodes, not {len(episodes)}"
                )
            episodes = [checks.check(episode) for episode in found]
    except BaseException as error:  # a filter may raise anything
        if isinstance(error, asyncio.CancelledError) and was_cancelled():
            raise
        message = "".join(traceback.format_exception(error))
        raise RunError(
            f"the algorithm's reward shaping or group filters failed on prompt group {number}:\n{message}"
        ) from error
    return episodes
