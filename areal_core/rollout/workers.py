"""Rollout workers as the rollout controller sees them: processes in which the user's code runs.

The driver starts the workers and restarts a lost one. Each group goes to the worker with the fewest groups. For each
partial generation, a worker requests a slot of a server here and sends the generation to that server: tokens never pass
through the controller.

A worker that blocks, leaks, crashes or is killed costs the episodes that it was running: its groups go to another
worker. A group that was running in LOSSES_AMONG_OTHERS lost workers is a suspect. Suspects run one at a time, so that
the one whose episodes kill workers is found: after LOSSES_ALONE more losses the group fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.disk import append_events
from areal_core.errors import RunError
from areal_core.messages.workflows import (
    Acquire,
    AttemptFailed,
    Granted,
    GroupOutcome,
    GroupResult,
    NoSlot,
    Release,
    RunGroup,
    SlotLost,
    Welcome,
    WorkflowsReady,
)
from areal_core.runtime.rpc import Message, Peer, PeerClosed, Server, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.interfaces.inference import Grant, Slots

LOSSES_AMONG_OTHERS, LOSSES_ALONE = 2, 2
"""Lost workers after which a group is a suspect; further lost workers after which it fails."""
SETTLED_S = 0.1
"""Seconds until the groups of a lost worker go to others: by then, workers that died together are all known as lost."""
LOSSES_IN_A_ROW = 8
"""Workers lost in a row, with no group ended in between, that end the run (at least two for each worker): the workflow
kills its process whatever the prompt."""


@dataclass(slots=True, eq=False)
class _Worker:
    peer: Peer
    tasks: list[RunGroup] = field(default_factory=list)
    """Groups that it runs, or was running when it was lost."""
    holders: dict[int, _Holder] = field(default_factory=dict)
    """Holders of its slots, by the worker's own numbers."""


@dataclass(slots=True, eq=False)
class _Holder:
    """The controller's end of a worker's lease: sends the worker a message for each event."""

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
        with contextlib.suppress(PeerClosed):  # `_receive` handles the lost worker
            self.peer.notify(message)


class RolloutWorkers:
    """Runs prompt groups in worker processes.

    Args:
        address: where the workers connect.
        slots: gives slots of the servers.
        count: number of workers.
        start_timeout_s: seconds in which all workers must have loaded workflow and data.
        welcome: the first message to each worker.
        timeline: file that gets a JSON line for each group: its worker, begin and end.
        log: writes a line to the run's log.

    Attributes:
        rows: number of rows in the data set; 0 if nothing is trained.
        held_out_rows: number of rows in the evaluation's data set.
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
        self._has_loaded = False
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
        """Start to accept workers, and return the address."""
        self._server = await serve(self._address, self._receive)
        return self._server.address

    async def start(self) -> None:
        """Wait until all workers have loaded workflow and data.

        Raises:
            RunError: they are not ready within `start_timeout_s`.
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
        """Number of requests that wait for a slot."""
        return sum(holder.is_waiting for worker in self._workers for holder in worker.holders.values())

    async def run(self, task: RunGroup) -> GroupResult:
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
        return GroupResult(GroupOutcome((), {}, (), len(task.samples), failure, is_kept=True))

    async def close(self) -> None:
        """Close all connections, so that the workers end; safe to call twice."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()

    # Workers.

    async def _find_worker(self) -> _Worker:
        """Return the worker with the fewest groups, once there is one."""
        while self._cause is not None or not self._workers:
            if self._cause is not None:
                raise self._cause
            self._changed.clear()
            await self._changed.wait()
        return min(self._workers, key=lambda worker: len(worker.tasks))

    async def _run_in(self, worker: _Worker, task: RunGroup) -> GroupResult:
        worker.tasks.append(task)
        began = time.time()
        try:
            ended: GroupResult = await worker.peer.request(task, None, f"the end of group {task.number}")
        except PeerClosed:
            raise  # keep the task listed: `_lose` reports it
        except BaseException:
            worker.tasks.remove(task)
            raise
        worker.tasks.remove(task)
        self._lost_in_a_row = 0
        ran = {"group": task.number, "worker": worker.peer.name, "version": min(ended.outcome.versions, default=-1)}
        append_events(self._timeline, ran | {"begin": began, "end": time.time()})
        return ended

    async def _receive(self, peer: Peer) -> None:
        """Serve a worker until it is lost: welcome it, wait until it has loaded, then answer its messages."""
        peer.notify(self._welcome)
        ready = await peer.receive()
        assert isinstance(ready, WorkflowsReady)
        if self._has_loaded and (ready.rows, ready.held_out_rows) != (self.rows, self.held_out_rows):
            self._cause = RunError(
                f"{peer.name} has {ready.rows} rows of the data set and {ready.held_out_rows} of the evaluation's; "
                f"the workers before it had {self.rows} and {self.held_out_rows}",
                hints=["the length of a data set must stay the same during a run"],
            )
            self._changed.set()
            return
        self.rows, self.held_out_rows, self._has_loaded = ready.rows, ready.held_out_rows, True
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
        consequence = f"other workers run the episodes of {_rows(rows)} again" if rows else "it had no episodes"
        self._log(f"{worker.peer.name} was lost; {consequence}")

    # Messages of workers.

    def _on_message(self, worker: _Worker, message: Message) -> None:
        match message:
            case Acquire(number, request) if number not in worker.holders:
                holder = worker.holders[number] = _Holder(worker.peer, number)
                self._slots.acquire(request, holder)
            case Release(number, has_failed) if number in worker.holders:
                self._slots.release(worker.holders.pop(number), has_failed=has_failed)
            case AttemptFailed():
                self.on_failure(message.group, message.sample, message.attempt, message.error)


def _rows(rows: Sequence[int]) -> str:
    """Return the first five row numbers in words, and how many more there are."""
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"data row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"
