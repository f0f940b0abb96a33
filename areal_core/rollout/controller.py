"""The rollout controller: admits prompt groups under the staleness bound and hands finished ones out as batches.

The way of a group: `_admit` gives it a number and starts it; the workers run its episodes, and the algorithm's filters
on them; `_group_ended` fails, filters or finishes it; the buffer makes finished groups durable; `next_batch` hands out
the oldest B of them. A group that failed, was filtered or went stale leaves every count, so
that another prompt takes its place. What is kept in memory changes only after the ledger has it; while its disk refuses
to be written, everything waits, for a bounded time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from areal_core.background import start_task
from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.ledger.groups import PromptGroup
from areal_core.messages.rollouts import Beginning, Manifest
from areal_core.messages.workflows import RunGroup
from areal_core.rollout.buffer import GroupBuffer
from areal_core.rollout.checks import GroupChecks
from areal_core.rollout.staleness import AdmissionCounts, capacity
from areal_core.rollout.tally import Tally

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.config.sections import RolloutSection
    from areal_core.data.sampler import PromptSampler
    from areal_core.interfaces.inference import InferenceEngine, SamplingParameters, WeightUpdate
    from areal_core.ledger.store import Ledger
    from areal_core.messages.workflows import GroupFacts
    from areal_core.rollout.samples import SampleLog
    from areal_core.rollout.workers import RolloutWorkers

FLUSH_INTERVAL_S = 0.25


class RolloutController:
    """Keeps episodes running and batches ready. Lives in one event loop; see the module's text for the way of a group.

    Args:
        section: settings.
        runner: runs prompt groups.
        engine: whose weights `sync` changes.
        sampler: which row comes when.
        sampling: settings of every generation in training.
        ledger: records what becomes of each group.
        vocabulary: how many token ids the model has; None where that is not known.
        samples: keeps a few episodes for the report.
    """

    def __init__(
        self,
        section: RolloutSection,
        runner: RolloutWorkers,
        engine: InferenceEngine,
        sampler: PromptSampler,
        sampling: SamplingParameters,
        ledger: Ledger,
        vocabulary: int | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        self.section = section
        self._runner = runner
        self._engine = engine
        self._sampler = sampler
        self.sampling = sampling
        self._ledger = ledger
        self.vocabulary = vocabulary
        self._checks = GroupChecks()
        self._samples = samples
        self.counts = AdmissionCounts()
        self._synced = {0: 0}
        self.version = 0
        self._tally = Tally()
        self._now = asyncio.get_running_loop().time
        self._idle_s, self._seen_at = 0.0, self._now()
        self._next_number = 0
        self._positions = {0: 0}  # by batches trained, the first group under the weights that they made
        self._retried: list[int] = []
        self._open: set[int] = set()  # dispatched, and its fate not known yet
        self._buffer = GroupBuffer(ledger)
        self._running: set[asyncio.Task[None]] = set()
        self._progressed = self._now()  # when a group was finished last
        self._changed = asyncio.Event()
        self._fatal: RunError | None = None
        self._consecutive_failures = 0
        self._is_closing = False
        self._awaited = 0  # the step whose batch the trainer asked for last
        self._flusher: asyncio.Task[None] | None = None

    # The life of the controller.

    def restore(self, *, discard: bool, log: Callable[[str], None] = lambda _: None) -> None:
        """Take up a run where its last commit left it.

        Args:
            discard: see `Ledger.rollback`.
            log: told of what is damaged, and generated anew.
        """
        self._ledger.rollback(discard=discard)
        self._synced |= self._ledger.weight_syncs()
        self._next_number = self._ledger.position()
        self._buffer.restore(self._ledger.finished(log))
        self._retried = self._ledger.unfinished()
        self.counts = AdmissionCounts(
            ready=len(self._buffer),
            consumed=self._ledger.committed_step * self.section.batch_size,
            trained=self._ledger.committed_step,
        )

    @property
    def beginning(self) -> Beginning:
        """The last commit, from which the trainer goes on."""
        step, highest = self._ledger.committed_step, max(self._synced)
        # A resumed run syncs above every version of its past.
        version = 0 if step == highest == 0 else highest + 1
        return Beginning(step, self._ledger.checkpoint, version, self._ledger.checkpoint_digest)

    def start(self) -> None:
        """Begin to admit groups."""
        self._flusher = start_task(self._keep(), "flushing of the ledger")
        self._admit()

    async def close(self) -> None:
        """Cancel what runs and close the ledger, which then accounts for every group that was dispatched."""
        self._is_closing = True
        tasks = [*self._running, *([self._flusher] if self._flusher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._buffer.flush()
        await asyncio.to_thread(self._ledger.close, [*self.open_groups])

    @property
    def open_groups(self) -> set[int]:
        """Numbers of the groups in flight, with those that a resume has yet to dispatch again."""
        return self._open.union(self._retried)

    async def copy_ledger(self, target: sqlite3.Connection) -> set[int]:
        """Copy the ledger, with all that is known, while generation goes on.

        Args:
            target: an empty database, which another thread writes.

        Returns:
            Numbers of the groups that may be in flight in the copy.
        """
        in_flight, first = self.open_groups, self._next_number

        def copy() -> None:
            self._buffer.write()
            self._ledger.copy_into(target)

        await self._buffer.durably(copy)
        return in_flight.union(range(first, self._next_number))  # the latter were dispatched meanwhile

    # The trainer's requests.

    async def next_batch(self, step: int) -> Manifest:
        """The batch of `step`, which is also the number of batches trained before it: B groups by their numbers.

        It names no record where all B groups failed and `incomplete_groups` is `drop`.

        Raises:
            RunError: the engine died, workflows keep failing, or nothing was finished for `stall_timeout_s`.
        """
        began, size = self._now(), self.section.batch_size
        stale: list[PromptGroup] = []
        self._awaited = step
        while True:
            self._changed.clear()  # a group that ends while the ledger is written wakes the wait below
            await self._buffer.flush()
            stale += self._drop_stale(step)
            if len(self._buffer) >= size:
                break
            await self._wait_for_change(began)
        groups = await self._buffer.take(size, step)
        self.counts.ready -= size
        self.counts.consumed = (step + 1) * size
        self._admit()
        metrics = {"time/wait_for_rollouts_s": self._now() - began, **self._tally.take()}
        self._see_idle()
        metrics |= {"time/generation_idle_s": self._idle_s, **self._engine.take_metrics()}
        self._idle_s = 0.0
        records = tuple((group.number, group.record) for group in groups if group.record is not None)
        oldest = min((group.oldest for group in groups if group.oldest >= 0), default=self.version)
        lengths = [_mean_size(some) for some in (stale, groups)]
        if all(lengths):
            metrics["groups/stale_length_ratio"] = lengths[0] / lengths[1]
        synced = {version: trained for version, trained in self._synced.items() if version >= oldest}
        return Manifest(step, records, synced, metrics)

    async def sync(self, update: WeightUpdate, trained: int) -> None:
        """Change the engine's weights under the requests in flight; `trained` batches went into them."""
        # Before the engine has them: a deterministic resume issues all groups from here on anew, and may do so with one
        # too many (where generation is synchronous there is none, for none is admitted meanwhile), never one too few.
        self._positions[trained] = self._next_number
        await self._buffer.durably(lambda: self._ledger.synced(update.version, trained))
        self._synced[update.version] = trained
        await self._engine.update_weights(update)
        self.version = update.version
        self.counts.trained = trained
        self._admit()

    async def skip_sync(self, trained: int) -> None:
        """The engine's weights are still those of the trainer after `trained` batches: nothing grows stale by them."""
        self._positions[trained] = self._next_number
        await self._buffer.durably(lambda: self._ledger.synced(self.version, trained))
        self._synced[self.version] = trained
        self.counts.trained = trained
        self._admit()

    async def commit(self, step: int, folder: Path) -> None:
        """A checkpoint of `step` trained batches is complete in `folder`; more may have been trained meanwhile."""
        # Where those weights have not come here yet, no group is theirs.
        position = self._positions.get(step, self._next_number)

        def commit() -> None:  # segments that no row names go, so what has been heard of is written before, each time
            self._buffer.write()
            self._ledger.commit(step, folder, position)

        await self._buffer.durably(commit)
        self._buffer.collect()
        self._positions = {trained: number for trained, number in self._positions.items() if trained >= step}

    # Groups.

    def _admit(self) -> None:
        """Start as many groups as there is room for."""
        while self._may_admit():
            number = self._retried.pop(0) if self._retried else self._next_number
            self._next_number = max(self._next_number, number + 1)
            prompt_id = self._sampler[number]
            self._ledger.dispatched(number, *prompt_id)
            self._open.add(number)
            self._see_idle()
            self.counts.running += 1
            task = start_task(self._run(PromptGroup(number, prompt_id)), f"group {number}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _see_idle(self) -> None:
        """Add up the time in which nothing is under way; called before that may change, and before it is told."""
        now = self._now()
        self._idle_s += 0.0 if self.counts.running else now - self._seen_at
        self._seen_at = now

    def _may_admit(self) -> bool:
        if self._is_closing or self._fatal is not None or capacity(self.section, self.counts) <= 0:
            return False
        # While newer weights are still on their way, what would be sampled now may already be too old to be used.
        lag = self._awaited - self.counts.trained
        return self.section.stale != "drop" or lag <= self.section.max_staleness

    async def _run(self, group: PromptGroup) -> None:
        samples = tuple(range(self.section.group_size))
        task = RunGroup(group.number, *group.prompt_id, samples, self.sampling, False, self.section.episode_timeout_s)
        try:
            ended = await self._runner.run(task)
        except RunError as error:
            self._fail(error)
            return  # its fate is open: a resume issues it again
        facts, group.record = ended.facts, ended.record
        if group.record is not None and (fault := self._checks.fault(facts, self._synced)):
            failed = {"rewards": (), "metrics": {}, "failed": len(samples), "failure": fault, "versions": ()}
            group.record, facts = None, msgspec.structs.replace(facts, **failed)
            self._ledger.failed(group.number, 0, 0, fault)
        group.oldest = min(facts.versions, default=-1)
        self._group_ended(group, facts)

    def _group_ended(self, group: PromptGroup, facts: GroupFacts) -> None:
        self._see_idle()
        self.counts.running -= 1
        self._open.discard(group.number)
        self._tally.add(facts)
        if facts.failure:
            self._count_failure(facts.failure)
        elif facts.rewards:  # a row that was skipped neither failed nor shows that episodes succeed
            self._consecutive_failures = 0
            if self._samples is not None:
                with suppress(DiskError):  # the ledger, which is written next, waits and says so
                    self._samples.saw(group.number, facts, self.version)
        incomplete = self.section.incomplete_groups
        if facts.failure and (incomplete == "replace" or (incomplete == "use" and not facts.rewards)):
            self._leave(group.number, "failed")
        elif not facts.is_kept:
            self._leave(group.number, "filtered")
        else:
            self.counts.ready += 1
            self._ledger.ended(group)
            self._progressed = self._now()
        if self.counts.ready >= self.section.batch_size or self._fatal:
            self._changed.set()
        self._admit()

    def _count_failure(self, failure: str) -> None:
        self._consecutive_failures += 1
        if self._consecutive_failures >= self.section.max_consecutive_failures:
            self._fail(
                RunError(
                    f"{self._consecutive_failures} prompt groups failed one after another; the last one:\n{failure}",
                    hints=[
                        "a judge or server that is back: resume; a workflow or reward that was mended: resume with "
                        "--allow-changes; or raise rollout.max_consecutive_failures"
                    ],
                )
            )

    def _leave(self, number: int, reason: str) -> None:
        """A group that is not trained on and leaves every count."""
        self._tally.events[reason] += 1
        self._ledger.dropped(number, reason, self.counts.trained)

    def _drop_stale(self, step: int) -> list[PromptGroup]:
        if self.section.stale != "drop":
            return []
        stale = self._buffer.drop_stale(self._synced, step, self.section.max_staleness)
        for group in stale:
            self._leave(group.number, "stale")
        self.counts.ready -= len(stale)
        self._admit()
        return stale

    # Waiting.

    def _fail(self, error: RunError) -> None:
        if self._fatal is None:
            self._fatal = error
        self._changed.set()

    async def _wait_for_change(self, began: float) -> None:
        if self._fatal is not None:
            raise self._fatal
        remaining = max(began, self._progressed) + self.section.stall_timeout_s - self._now()
        if remaining <= 0:
            episodes = len(self._running) * self.section.group_size
            raise RunError(
                f"no group was finished within rollout.stall_timeout_s: {self.section.stall_timeout_s:g}; "
                f"{self.describe()}; "
                f"{self._runner.waiting} of {episodes} episodes wait for a slot of a server",
                hints=["if groups are filtered or fail, see the counts above; else raise rollout.stall_timeout_s"],
            )
        try:
            await asyncio.wait_for(self._changed.wait(), min(remaining, 1.0))
        except TimeoutError:
            return

    def describe(self) -> str:
        """One line on where the groups are, for whoever waits."""
        counts = self.counts
        events = ", ".join(f"{count} {name}" for name, count in sorted(self._tally.events.items()))
        return (
            f"{counts.ready} groups ready for batches of {self.section.batch_size}, {counts.running} running, "
            f"weights of version {self.version}"
            + (f"; since the last batch: {events}" if events else "")
            + (f"; tried again: {self._buffer.refused}" if self._buffer.refused else "")
        )

    async def _keep(self) -> None:
        """Flush in the background."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            try:
                await self._buffer.flush()
            except RunError as error:
                self._fail(error)
                return
            if len(self._buffer) >= self.section.batch_size:
                self._changed.set()


def _mean_size(groups: list[PromptGroup]) -> float:
    """Mean bytes of groups' trajectories, which grow as their tokens do; 0 where there is none."""
    sizes = [group.record.size for group in groups if group.record is not None]
    return sum(sizes) / len(sizes) if sizes else 0.0
