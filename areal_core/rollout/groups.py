"""Runs the episodes of one prompt group in a rollout worker: data row, episodes, reward shaping, group filters.

All of the user's code that a rollout needs is called from here.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any

from areal_core.data.packing import column_layout, pack_group, sampled_versions, to_bytes
from areal_core.errors import writable
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.workflow import SkippedRowError
from areal_core.messages.workflows import EpisodeShown, GroupOutcome, GroupResult
from areal_core.rollout.episodes import EpisodeError
from areal_core.rollout.shaping import shape

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from areal_core.config.sections import RolloutSection
    from areal_core.data.trajectory import Episode
    from areal_core.interfaces.algorithm import GroupFilter
    from areal_core.interfaces.dataset import Dataset
    from areal_core.ledger.segments import SegmentWriter
    from areal_core.messages.workflows import RunGroup
    from areal_core.rollout.episodes import EpisodeRunner

SHOWN_EPISODES = 4
"""Episodes of a group that the log of samples gets."""


class GroupRunner:
    """Runs prompt groups in this event loop.

    Args:
        runner: runs episodes.
        dataset: rows to train on; None if nothing is trained.
        held_out: rows of evaluations; None if there are none.
        filters: the algorithm's reward shaping, then its group filters.
        section: `rollout` of the config.
        segments: writes the records of groups; None if nothing is trained.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        dataset: Dataset | None,
        held_out: Dataset | None,
        filters: Sequence[GroupFilter],
        section: RolloutSection,
        segments: SegmentWriter | None,
    ) -> None:
        self.runner = runner
        self._segments = segments
        self._dataset = dataset
        self._held_out = held_out
        self._filters = filters
        self._section = section

    async def run(self, task: RunGroup) -> GroupResult:
        """Run the episodes of a group, shape and filter it, and write its record into a segment.

        Raises:
            RunError: the run cannot continue: the engine has died, a group filter failed, or the disk refuses.
        """
        dataset = self._held_out if task.is_evaluation else self._dataset
        assert dataset is not None
        try:
            row = dataset[task.row]
        except BaseException as error:  # noqa: BLE001 - a data set may raise anything
            trace = writable("".join(traceback.format_exception(error)))
            which = "held-out " if task.is_evaluation else ""
            failure = f"{which}{name_row(dataset, task.row)} cannot be read: {trace}"
            self.runner.on_failure(task.number, 0, 0, failure)
            return GroupResult(GroupOutcome((), {}, (), len(task.samples), failure, is_kept=True))
        failures: list[str] = []
        is_skipped = False

        async def run_episode(sample: int) -> Episode | None:
            nonlocal is_skipped
            try:
                return await self.runner.run(row, task, sample)
            except EpisodeError as error:
                is_skipped |= isinstance(error.__cause__, SkippedRowError) and not task.is_evaluation
                failures.append(str(error))
                return None

        ended = await _gather([run_episode(sample) for sample in task.samples])
        if is_skipped:
            return GroupResult(GroupOutcome((), {}, (), 0, "", is_kept=False))
        episodes = {s: episode for s, episode in zip(task.samples, ended, strict=True) if episode is not None}
        rewards = tuple(episode.reward for episode in episodes.values())
        names = {name for episode in episodes.values() for name in episode.metrics}
        metrics = {name: sum(episode.metrics.get(name, 0.0) for episode in episodes.values()) for name in names}
        shown = tuple(
            EpisodeShown(e.text, e.reward, e.rewards, len(e.prompt)) for e in [*episodes.values()][:SHOWN_EPISODES]
        )
        kept: Sequence[Episode] | None = [*episodes.values()]
        if failures and self._section.incomplete_groups != "use":
            kept = []
        elif kept and not task.is_evaluation:
            kept = await shape(task.number, kept, self._filters, self.runner.checks, self._section)
        failure = failures[-1] if failures else ""
        # The counts of evaluations are reported with the next training group.
        counted = {} if task.is_evaluation else self.runner.pop_metrics()
        outcome = GroupOutcome(
            rewards, metrics, shown, len(failures), failure, is_kept=kept is not None, counted=counted
        )
        if not kept:
            return GroupResult(outcome)
        shaped = dict(zip(episodes, kept, strict=True))
        columns = pack_group(task.number, (task.row, task.epoch), len(task.samples), shaped)
        if task.is_evaluation:  # an evaluation reads neither images nor wide columns, which may be many megabytes
            narrow = {k: v for k, v in columns.items() if v.ndim == 1 and not k.startswith("multimodal.")}
            return GroupResult(outcome, packed=to_bytes(narrow))
        assert self._segments is not None
        outcome.versions, outcome.layout = tuple(sampled_versions(columns)), column_layout(columns)
        return GroupResult(outcome, await self._segments.write(to_bytes(columns)))


async def _gather(works: Sequence[Coroutine[Any, Any, Episode | None]]) -> list[Episode | None]:
    """Return the results of all. If one raises, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
