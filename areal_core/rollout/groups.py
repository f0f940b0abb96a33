"""Running the episodes of one prompt: its row, its episodes, what the algorithm's group filters make of them.

All code of users that a rollout needs is called from here, in a rollout worker.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any

from areal_core.data.packing import column_layout, pack_group, sampled_versions, to_bytes
from areal_core.errors import writable
from areal_core.interfaces.dataset import name_row
from areal_core.interfaces.workflow import SkippedRowError
from areal_core.messages.workflows import EpisodeShown, GroupEnded, GroupFacts
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
"""Of a group, in the log of samples."""


class GroupRunner:
    """Runs prompt groups in this event loop.

    Args:
        runner: runs episodes.
        dataset: rows to prompt with; None where nothing is trained.
        held_out: rows of evaluations; None where there are none.
        filters: of the algorithm: reward shaping, then group filters.
        section: what becomes of groups in which an episode failed, and how long a filter may take.
        segments: writes what is trained on; None where nothing is.
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

    async def run(self, task: RunGroup) -> GroupEnded:
        """Run its episodes to their ends; what has become of them.

        Raises:
            RunError: the run cannot go on: the engine has died, a group filter fails, or the disk refuses.
        """
        dataset = self._held_out if task.is_evaluation else self._dataset
        assert dataset is not None
        try:
            row = dataset[task.row]
        except BaseException as error:  # noqa: BLE001 - a data set may raise anything
            told = writable("".join(traceback.format_exception(error)))
            failure = f"{'held-out ' * task.is_evaluation}{name_row(dataset, task.row)} cannot be read: {told}"
            self.runner.on_failure(task.number, 0, 0, failure)
            return GroupEnded(GroupFacts((), {}, (), len(task.samples), failure, is_kept=True))
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
            return GroupEnded(GroupFacts((), {}, (), 0, "", is_kept=False))
        episodes = {s: episode for s, episode in zip(task.samples, ended, strict=True) if episode is not None}
        rewards = tuple(episode.reward for episode in episodes.values())
        names = {name for episode in episodes.values() for name in episode.metrics}
        metrics = {name: sum(episode.metrics.get(name, 0.0) for episode in episodes.values()) for name in names}
        shown = tuple(EpisodeShown(e.text, e.reward, e.rewards) for e in [*episodes.values()][:SHOWN_EPISODES])
        kept: Sequence[Episode] | None = [*episodes.values()]
        if failures and self._section.incomplete_groups != "use":
            kept = []
        elif kept and not task.is_evaluation:
            kept = await shape(task.number, kept, self._filters, self.runner.checks, self._section)
        failure = failures[-1] if failures else ""
        counted = {} if task.is_evaluation else self.runner.take_metrics()  # of both, told with training's
        facts = GroupFacts(rewards, metrics, shown, len(failures), failure, is_kept=kept is not None, counted=counted)
        if not kept:
            return GroupEnded(facts)
        shaped = dict(zip(episodes, kept, strict=True))
        columns = pack_group(task.number, (task.row, task.epoch), len(task.samples), shaped)
        if task.is_evaluation:  # it looks at neither images nor wide columns, which may be many megabytes
            narrow = {k: v for k, v in columns.items() if v.ndim == 1 and not k.startswith("multimodal.")}
            return GroupEnded(facts, packed=to_bytes(narrow))
        assert self._segments is not None
        facts.versions, facts.layout = tuple(sampled_versions(columns)), column_layout(columns)
        return GroupEnded(facts, await self._segments.write(to_bytes(columns)))


async def _gather(works: Sequence[Coroutine[Any, Any, Episode | None]]) -> list[Episode | None]:
    """The results of all; none goes on where one raises or nobody waits any more."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
