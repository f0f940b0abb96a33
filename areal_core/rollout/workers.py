"""Rollout workers as the rollout controller sees them: processes in which the code of users runs.

The driver starts them, and starts one again that is lost. A group goes to the worker with the fewest. For each partial
generation a worker asks here for a slot of a server, and that server for tokens: none passes through this process. So
the controller alone knows servers, weights and the ledger, and a worker that blocks, leaks, crashes or is killed costs
the episodes that it had: its groups go to another one. Those that have lost two are suspects, which run one at a time;
the one that loses two more workers is the cause, and fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.disk import append_events
from areal_core.errors import RunError
from areal_core.messages import Message, Peer, PeerClosed, Server, serve
from areal_core.messages.workflows import (
    Acquire,
    AttemptFailed,
    Granted,
    GroupEnded,
    GroupFacts,
    NoSlot,
    Release,
    RunGroup,
    SlotLost,
    Welcome,
    WorkflowsReady,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.interfaces.inference import Grant, Slots

LOSSES_AMONG_OTHERS, LOSSES_ALONE = 2, 2
"""Workers that a group may lose with all others before it is a suspect; and then, while no other suspect runs, before
it counts as the cause."""
SETTLED_S = 0.1
"""Before its groups go to others: of workers that die together, all are known to be lost by then."""
LOSSES_IN_A_ROW = 8
"""Workers lost without one group that ended in between, two for each where that is more: what they run ends them,
whatever the prompt."""


@dataclass(slots=True, eq=False)
class _Worker:
    peer: Peer
    tasks: list[RunGroup] = field(default_factory=list)
    """Groups that it has; of a worker that is lost, those that it had."""
    holders: dict[int, _Holder] = field(default_factory=dict)
    """Of slots, by its own numbers."""


@dataclass(slots=True, eq=False)
class _Holder:
    """A `SlotHolder` for a worker."""

    peer: Peer
    number: int
    is_waiting: bool = True

    def give(self, grant: Grant) -> None:
        self.is_waiting = False
        self._post(Granted(self.number, grant))

    def fail(self, error: RunError) -> None:
        self._post(NoSlot(self.number, error.message, tuple(error.hints)))

    def lose(self) -> None:
        self._post(SlotLost(self.number))

    def _post(self, message: Message) -> None:
        with contextlib.suppress(PeerClosed):  # then its end is about to be seen
            self.peer.notify(message)


class RolloutWorkers:
    """Runs prompt groups in worker processes.

    Args:
        address: at which workers arrive.
        slots: of the servers that they ask.
        count: how many workers.
        start_timeout_s: for workers to load workflow and data.
        welcome: what each is told first.
        timeline: file for when each group was run, and where; a JSON line each.
        log: takes a line for whoever watches the run.

    Attributes:
        rows: of the data set; 0 where nothing is trained.
        held_out_rows: of the evaluation's.
    """

    def __init__(
        self,
        address: str,
        slots: Slots,
        *,
        count: int,
        start_timeout_s: float,
        welcome: Welcome,
        timeline: Path,
        log: Callable[[str], None],
    ) -> None:
        self.rows = self.held_out_rows = 0
        self.on_failure: Callable[[int, int, int, str], None] = lambda *_: None
        self._address, self._welcome, self._timeline = address, welcome, timeline
        self._slots = slots
        self._count = count
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._server: Server | None = None
        self._workers: list[_Worker] = []
        self._changed = asyncio.Event()
        self._suspects = asyncio.Lock()
        self._cause: RunError | None = None
        self._lost_in_a_row = 0
        self._is_closing = False

    async def listen(self) -> str:
        """Let workers in from now on; the address."""
        self._server = await serve(self._address, self._receive)
        return self._server.address

    async def start(self) -> None:
        """Wait until all workers have loaded workflow and data.

        Raises:
            RunError: they take too long.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while len(self._workers) < self._count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(
                f"{len(self._workers)} of {self._count} rollout workers are ready after {self._start_timeout_s:g} s"
            ) from None

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(holder.is_waiting for worker in self._workers for holder in worker.holders.values())

    async def run(self, task: RunGroup) -> GroupEnded:
        """See `GroupRunner.run`."""
        losses = LOSSES_AMONG_OTHERS + LOSSES_ALONE
        for loss in range(losses):
            async with self._suspects if loss >= LOSSES_AMONG_OTHERS else contextlib.nullcontext():
                worker = await self._find_worker()
                try:
                    return await self._run_in(worker, task)
                except PeerClosed:
                    lost = worker.peer.name
                    await asyncio.sleep(SETTLED_S)
        which = f"this prompt, data row {task.row}, {lost} the last"
        failure = f"{losses} rollout workers were lost with {which}: see its log"
        self.on_failure(task.number, task.samples[0], losses, failure)
        return GroupEnded(GroupFacts((), {}, (), len(task.samples), failure, is_kept=True))

    async def close(self) -> None:
        """End all workers; safe to call twice."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()

    # Workers.

    async def _find_worker(self) -> _Worker:
        """The one with the fewest groups."""
        while self._cause is not None or not self._workers:
            if self._cause is not None:
                raise self._cause
            self._changed.clear()
            await self._changed.wait()
        return min(self._workers, key=lambda worker: len(worker.tasks))

    async def _run_in(self, worker: _Worker, task: RunGroup) -> GroupEnded:
        worker.tasks.append(task)
        began = time.time()
        try:
            ended: GroupEnded = await worker.peer.request(task, None, f"the end of group {task.number}")
        except PeerClosed:
            raise  # what it was lost with is told
        except BaseException:
            worker.tasks.remove(task)
            raise
        worker.tasks.remove(task)
        self._lost_in_a_row = 0
        ran = {"group": task.number, "worker": worker.peer.name, "version": min(ended.facts.versions, default=-1)}
        append_events(self._timeline, ran | {"begin": began, "end": time.time()})
        return ended

    async def _receive(self, peer: Peer) -> None:
        """A worker has come: it is told what is needed of it, loads that, and is given groups."""
        peer.notify(self._welcome)
        ready = await peer.receive()
        assert isinstance(ready, WorkflowsReady)
        self.rows, self.held_out_rows = ready.rows, ready.held_out_rows
        worker = _Worker(peer)
        self._workers.append(worker)
        self._changed.set()
        try:
            while True:
                self._on_message(worker, await peer.receive())
        finally:
            self._lose(worker)

    def _lose(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        for holder in worker.holders.values():
            self._slots.release(holder)
        if self._is_closing:
            return
        rows = sorted({task.row for task in worker.tasks})
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= max(LOSSES_IN_A_ROW, 2 * self._count):
            lost = f"{self._lost_in_a_row} rollout workers were lost one after another, and no group ended in between"
            hints = [f"what it wrote: RUN_DIR/logs/{worker.peer.name}.log", "try the workflow's code by itself"]
            self._cause = RunError(f"{lost}; the last, {worker.peer.name}, had {_rows(rows)}", hints=hints)
            self._changed.set()
            return
        had = f"the episodes of {_rows(rows)} are begun again" if rows else "it had no episodes"
        self._log(f"{worker.peer.name} was lost; {had}")

    # What episodes ask for.

    def _on_message(self, worker: _Worker, message: Message) -> None:
        match message:
            case Acquire(number, want) if number not in worker.holders:
                holder = worker.holders[number] = _Holder(worker.peer, number)
                self._slots.acquire(want, holder)
            case Release(number, has_failed) if number in worker.holders:
                self._slots.release(worker.holders.pop(number), has_failed=has_failed)
            case AttemptFailed():
                self.on_failure(message.group, message.sample, message.attempt, message.error)


def _rows(rows: Sequence[int]) -> str:
    """Some rows by their numbers, and how many more there are."""
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"data row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"
