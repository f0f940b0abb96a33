"""The rollout controller: admits prompt groups under the staleness bound, and hands finished ones to the trainer.

The states of a group, and the method that makes each move:

      _admit            _run              _group_ended           next_batch
    ──────────► DISPATCHED ────► RUNNING ──────────────► READY ────────────► CONSUMED
                                    │                      │
                                    │ _group_ended         │ _drop_stale
                                    ├──────────► FILTERED  └────────────► STALE
                                    └──────────► FAILED

- DISPATCHED: the group has a number, which decides its prompt, and a row in the ledger. It counts as running.
- RUNNING: a rollout worker runs its episodes and the algorithm's filters, and writes its record into a segment.
- READY: the ledger knows the record (`GroupBuffer.flush`). The group waits for its turn, in the order of numbers.
- CONSUMED: the trainer has its record in a batch. `commit` makes this final; a resume before that makes it READY again.
- FILTERED, FAILED, STALE: the group leaves every count, so that `_admit` dispatches another prompt in its place.

A resume (`restore`) dispatches groups without an end again, under the same number.

What runs, and what it waits for:

    _admit       called whenever a count changes: by `capacity`, room for more groups under the staleness bound
    _run         one task for each group: its rollout worker
    _keep        every FLUSH_INTERVAL_S: the ledger's disk, for groups that have ended
    next_batch   the trainer's request: batch_size READY groups, and progress within `rollout.stall_timeout_s`
    sync         the trainer's request: the ledger's disk, and then the servers

Memory changes only after the ledger has recorded the change. While the ledger's disk cannot be written, everything
waits, for a bounded time.
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
from areal_core.messages.rollouts import FolderNeeded, Manifest, ResumePoint
from areal_core.messages.workflows import RunGroup
from areal_core.metric_names import of_engine
from areal_core.rollout.buffer import GroupBuffer
from areal_core.rollout.checks import GroupChecks
from areal_core.rollout.clocks import GenerationClock
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
    from areal_core.messages.workflows import GroupOutcome
    from areal_core.rollout.samples import SampleLog
    from areal_core.rollout.workers import RolloutWorkers

FLUSH_INTERVAL_S = 0.25


class RolloutController:
    """Keeps episodes running and batches ready, in one event loop; see the module's text for the states of a group.

    Args:
        section: `rollout` of the config.
        runner: runs prompt groups in the rollout workers.
        engine: generates; `sync` changes its weights.
        sampler: the row and epoch of each group's number.
        sampling: parameters of every generation in training.
        ledger: records the state of each group.
        vocabulary: number of token ids that the model has; None if it is not known.
        samples: keeps a few episodes for the report; None if nothing shows them.
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
        self._generation = GenerationClock()
        self._next_number = 0
        self._positions = {0: 0}  # batches trained -> number of the first group dispatched under their weights
        self._retried: list[int] = []
        self._open: set[int] = set()  # dispatched and not ended
        self._buffer = GroupBuffer(ledger)
        self._running: set[asyncio.Task[None]] = set()
        self._progressed = self._now()  # time of the last group that became ready
        self._changed = asyncio.Event()
        self._fatal: RunError | None = None
        self._consecutive_failures = 0
        self._is_closing = False
        self._awaited = 0  # step of the trainer's last request for a batch
        self._flusher: asyncio.Task[None] | None = None

    # Start, resume and close.

    def restore(self, *, discard: bool, log: Callable[[str], None] = lambda _: None) -> None:
        """Resume from the last commit: groups without an end are dispatched again, finished ones are READY.

        Args:
            discard: see `Ledger.rollback`.
            log: takes a line for each damaged record, whose group is dispatched again.
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
    def resume_point(self) -> ResumePoint:
        """The last commit, from which the trainer resumes."""
        step, highest = self._ledger.committed_step, max(self._synced)
        # Versions are never reused: tokens of an earlier attempt carry the lower ones.
        version = 0 if step == highest == 0 else highest + 1
        return ResumePoint(step, self._ledger.checkpoint, version, self._ledger.checkpoint_digest)

    def start(self) -> None:
        """Start to admit groups."""
        self._flusher = start_task(self._keep(), "flushing of the ledger")
        self._admit()

    async def close(self) -> None:
        """Cancel the running groups and close the ledger, which then accounts for every dispatched group."""
        self._is_closing = True
        tasks = [*self._running, *([self._flusher] if self._flusher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._buffer.flush()
        await asyncio.to_thread(self._ledger.close, [*self.open_groups])

    @property
    def open_groups(self) -> set[int]:
        """Numbers of the groups in flight, and of those that a resume has not dispatched again yet."""
        return self._open.union(self._retried)

    async def copy_ledger(self, target: sqlite3.Connection) -> set[int]:
        """Copy the ledger, pending records included, while generation continues.

        Args:
            target: an empty database, which a thread writes.

        Returns:
            Numbers of the groups that may be in flight in the copy.
        """
        in_flight, first = self.open_groups, self._next_number

        def copy() -> None:
            self._buffer.write()
            self._ledger.copy_into(target)

        await self._buffer.durably(copy)
        return in_flight.union(range(first, self._next_number))  # groups that were dispatched during the copy

    # The trainer's requests.

    async def next_batch(self, step: int) -> Manifest | FolderNeeded:
        """Return the batch of `step`: the first `batch_size` READY groups in the order of their numbers.

        It names no record if all its groups failed and `incomplete_groups` is `drop`. While too few groups are READY,
        a server may need the weights in a folder: then return that at once, and the trainer asks again.

        Args:
            step: number of batches trained before it.

        Raises:
            RunError: the engine died, workflows keep failing, or no group became ready for `stall_timeout_s`.
        """
        began, size = self._now(), self.section.batch_size
        stale: list[PromptGroup] = []
        self._awaited = step
        while True:
            self._changed.clear()  # before the flush: a group that ends during it must wake the wait below
            await self._buffer.flush()
            stale += self._drop_stale(step)
            if len(self._buffer) >= size:
                break
            if self._engine.needs_folder():
                return FolderNeeded()
            await self._wait_for_change(began)
        groups = await self._buffer.take(size, step)
        self.counts.ready -= size
        self.counts.consumed = (step + 1) * size
        self._admit()
        metrics = {"time/wait_for_rollouts_s": self._now() - began, **self._tally.take()}
        metrics |= {of_engine(name): value for name, value in self._engine.pop_metrics().items()}
        metrics |= self._generation.take()
        records = tuple((group.number, group.record) for group in groups if group.record is not None)
        oldest = min((group.oldest for group in groups if group.oldest >= 0), default=self.version)
        lengths = [_mean_size(some) for some in (stale, groups)]
        if all(lengths):
            metrics["groups/stale_length_ratio"] = lengths[0] / lengths[1]
        synced = {version: trained for version, trained in self._synced.items() if version >= oldest}
        return Manifest(step, records, synced, metrics)

    async def sync(self, update: WeightUpdate, trained: int) -> None:
        """Change the engine's weights under the requests in flight.

        Args:
            update: the new weights and their version.
            trained: number of batches that were trained to make them.
        """
        # Record the position before the engine has the weights. A deterministic resume dispatches every group from here
        # on again. One group too many is harmless, one too few would mix weights.
        self._positions[trained] = self._next_number
        await self._buffer.durably(lambda: self._ledger.synced(update.version, trained))
        self._synced[update.version] = trained
        await self._engine.update_weights(update)
        self.version = update.version
        self.counts.trained = trained
        self._admit()

    async def skip_sync(self, trained: int) -> None:
        """Record that the engine's weights are still the trainer's after `trained` batches, for example of learning
        rate 0: tokens do not become stale by them."""
        self._positions[trained] = self._next_number
        await self._buffer.durably(lambda: self._ledger.synced(self.version, trained))
        self._synced[self.version] = trained
        self.counts.trained = trained
        self._admit()

    async def commit(self, step: int, folder: Path) -> None:
        """Make the batches before `step` final: the checkpoint in `folder` has them. The trainer may be further on."""
        # No group was dispatched under weights that have not been synced yet.
        position = self._positions.get(step, self._next_number)

        def commit() -> None:
            self._buffer.write()  # first: the commit deletes segments that no row of the ledger names
            self._ledger.commit(step, folder, position)

        await self._buffer.durably(commit)
        self._buffer.collect()
        self._positions = {trained: number for trained, number in self._positions.items() if trained >= step}

    # Groups.

    def _admit(self) -> None:
        """Dispatch as many groups as `capacity` leaves room for."""
        while self._may_admit():
            number = self._retried.pop(0) if self._retried else self._next_number
            self._next_number = max(self._next_number, number + 1)
            prompt_id = self._sampler[number]
            self._ledger.dispatched(number, *prompt_id)
            self._open.add(number)
            batch = self.counts.admitted // self.section.batch_size
            self._generation.started(batch)
            self.counts.running += 1
            task = start_task(self._run(PromptGroup(number, prompt_id), batch), f"group {number}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _may_admit(self) -> bool:
        if self._is_closing or self._fatal is not None or capacity(self.section, self.counts) <= 0:
            return False
        # The trainer may be ahead of the servers' weights: tokens sampled now could be too stale once consumed.
        lag = self._awaited - self.counts.trained
        return self.section.stale != "drop" or lag <= self.section.max_staleness

    async def _run(self, group: PromptGroup, batch: int) -> None:
        samples = tuple(range(self.section.group_size))
        task = RunGroup(group.number, *group.prompt_id, samples, self.sampling, False, self.section.episode_timeout_s)
        try:
            ended = await self._runner.run(task)
        except RunError as error:
            self._fail(error)
            return  # the group stays open, so that a resume dispatches it again
        outcome, group.record = ended.outcome, ended.record
        if group.record is not None and (fault := self._checks.fault(outcome, self._synced)):
            failed = {"rewards": (), "metrics": {}, "failed": len(samples), "failure": fault, "versions": ()}
            group.record, outcome = None, msgspec.structs.replace(outcome, **failed)
            self._ledger.failed(group.number, 0, 0, fault)
        group.oldest = min(outcome.versions, default=-1)
        self._generation.ended(batch)
        self._group_ended(group, outcome)

    def _group_ended(self, group: PromptGroup, outcome: GroupOutcome) -> None:
        self.counts.running -= 1
        self._open.discard(group.number)
        self._tally.add(outcome)
        if outcome.failure:
            self._count_failure(outcome.failure)
        elif outcome.rewards:  # a skipped row has none: it says nothing about whether episodes succeed
            self._consecutive_failures = 0
            if self._samples is not None:
                with suppress(DiskError):  # the ledger is written next, and reports a full disk
                    self._samples.saw(group, outcome, self.version)
        incomplete = self.section.incomplete_groups
        if outcome.failure and (incomplete == "replace" or (incomplete == "use" and not outcome.rewards)):
            self._leave(group.number, "failed")
        elif not outcome.is_kept:
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
        """Record a group that is not trained on. It leaves every count, so that `_admit` replaces it."""
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
        """Return one line with the number of groups in each state."""
        counts = self.counts
        events = [f"{count} {name}" for name, count in sorted(self._tally.events.items())]
        if rewards := self._tally.rewards:
            events.append(f"mean reward {sum(rewards) / len(rewards):.3g} of {len(rewards)} episodes")
        return (
            f"{counts.ready} groups ready for batches of {self.section.batch_size}, {counts.running} running, "
            f"weights of version {self.version}"
            + (f"; since the last batch: {', '.join(events)}" if events else "")
            + (f"; tried again: {self._buffer.refused}" if self._buffer.refused else "")
        )

    async def _keep(self) -> None:
        """Flush the ledger every FLUSH_INTERVAL_S."""
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
    """Mean size of the groups' records in bytes, a measure of their tokens; 0 without a record."""
    sizes = [group.record.size for group in groups if group.record is not None]
    return sum(sizes) / len(sizes) if sizes else 0.0
