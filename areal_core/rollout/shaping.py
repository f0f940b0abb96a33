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
    from areal_core.data.prompt_group import PromptGroup
    from areal_core.interfaces.algorithm import GroupStage
    from areal_core.rollout.checks import EpisodeChecks


async def shape(
    group: PromptGroup, stages: Sequence[GroupStage], checks: EpisodeChecks, section: RolloutSection
) -> bool:
    """Filter and shape a group in place; whether it is to be trained on.

    Args:
        group: whose episodes have all ended; one in which some failed is shaped only where it is used all the same.
        stages: in order.
        checks: what is asked of every episode.
        section: each stage may take as long as an episode.

    Raises:
        RunError: a stage raised, took too long, or returned what is no group; with its traceback.
    """
    if group.failure and (section.incomplete_groups != "use" or not group.finished_episodes):
        return True
    try:
        for stage in stages:
            given = group.finished_episodes
            found = stage(given)
            if inspect.isawaitable(found):
                async with asyncio.timeout(section.episode_timeout_s):
                    found = await found
            if found is None:
                return False
            if len(found) != len(given):
                raise ValueError(f"{stage} returned {len(found)} episodes for {len(given)}")
            shaped = iter(found)
            group.episodes = [None if e is None else checks.check(next(shaped)) for e in group.episodes]
    except BaseException as error:  # a stage may raise anything
        if isinstance(error, asyncio.CancelledError) and was_cancelled():
            raise
        told = "".join(traceback.format_exception(error))
        raise RunError(f"the algorithm's group stages failed on prompt group {group.number}:\n{told}") from error
    return True
