"""Rollout workers as the rollout controller sees them: processes in which the code of users runs.

The driver starts them, and starts one again that is lost. A group goes to the worker with the fewest. What its episodes
are to generate comes back here, to the engine of this process. So the controller alone knows engines, weights and the
ledger, and a worker that blocks, leaks, crashes or is killed costs the episodes that it had:
its groups go to another one. Those that have lost two are suspects, which run one at a time; the one that loses two
more workers is the cause, and fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces.inference import GenerationRequest
from areal_core.messages import Failed, Message, Peer, PeerClosed, Server, serve
from areal_core.messages.workflows import (
    AttemptFailed,
    CancelGeneration,
    CancelGroup,
    Generate,
    Generated,
    GroupEnded,
    GroupFacts,
    Placed,
    RunGroup,
    Unserved,
    Welcome,
    WorkflowsReady,
)
from areal_core.rollout.clocks import was_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.interfaces.inference import InferenceEngine

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
    number: int
    """Unlike those of all others of the run, its forerunners among them."""
    tasks: list[RunGroup] = field(default_factory=list)
    """Groups that it has; of a worker that is lost, those that it had."""
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Generations under way for it, by its own numbers."""


class RolloutWorkers:
    """Runs prompt groups in worker processes.

    Args:
        address: at which workers arrive.
        engine: generates for them.
        count: how many workers.
        start_timeout_s: for workers to load workflow and data.
        welcome: what each is told first.
        tell: takes a line for whoever watches the run.

    Attributes:
        rows: of the data set; 0 where nothing is trained.
        held_out_rows: of the evaluation's.
    """

    def __init__(
        self,
        address: str,
        engine: InferenceEngine,
        *,
        count: int,
        start_timeout_s: float,
        welcome: Welcome,
        tell: Callable[[str], None],
    ) -> None:
        self.rows = self.held_out_rows = 0
        self.on_failure: Callable[[int, int, int, str], None] = lambda *_: None
        self._address, self._welcome = address, welcome
        self._engine = engine
        self._count = count
        self._start_timeout_s = start_timeout_s
        self._tell = tell
        self._server: Server | None = None
        self._workers: list[_Worker] = []
        self._changed = asyncio.Event()
        self._suspects = asyncio.Lock()
        self._cause: RunError | None = None
        self._numbers = itertools.count()
        self._without_place = self._lost_in_a_row = 0
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
        """Episodes that wait for a place in the engine."""
        return self._without_place

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
        for task in [task for worker in self._workers for task in worker.requests.values()]:
            task.cancel()
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
        try:
            ended: GroupEnded = await worker.peer.request(task, None, f"the end of group {task.number}")
        except PeerClosed:
            raise  # what it was lost with is told
        except BaseException as error:
            worker.tasks.remove(task)
            if isinstance(error, asyncio.CancelledError):
                self._post(worker, CancelGroup(task.number, task.samples))
            raise
        worker.tasks.remove(task)
        self._lost_in_a_row = 0
        return ended

    async def _receive(self, peer: Peer) -> None:
        """A worker has come: it is told what is needed of it, loads that, and is given groups."""
        peer.notify(self._welcome)
        ready = await peer.receive()
        assert isinstance(ready, WorkflowsReady)
        self.rows, self.held_out_rows = ready.rows, ready.held_out_rows
        worker = _Worker(peer, next(self._numbers))
        self._workers.append(worker)
        self._changed.set()
        try:
            await self._serve(worker)
        finally:
            self._lose(worker)

    def _lose(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        for request in [*worker.requests.values()]:
            request.cancel()
        if self._is_closing:
            return
        rows = sorted({task.row for task in worker.tasks})
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= max(LOSSES_IN_A_ROW, 2 * self._count):
            lost = f"{self._lost_in_a_row} rollout workers were lost one after another, and no group ended in between"
            hints = [f"what it wrote: areal logs RUN_DIR {worker.peer.name}", "try the workflow's code by itself"]
            self._cause = RunError(f"{lost}; the last, {worker.peer.name}, had {_rows(rows)}", hints=hints)
            self._changed.set()
            return
        had = f"the episodes of {_rows(rows)} are begun again" if rows else "it had no episodes"
        self._tell(f"{worker.peer.name} was lost; {had}")

    # What episodes ask for.

    async def _serve(self, worker: _Worker) -> None:
        try:
            while True:
                message, number = await worker.peer.receive_request()
                match message:
                    case Generate():
                        task = start_task(self._generate(worker, message, number), "a generation for a worker")
                        worker.requests[message.place] = task
                        task.add_done_callback(partial(_forget, worker.requests, message.place))
                    case CancelGeneration(place) if place in worker.requests:
                        worker.requests[place].cancel()
                    case AttemptFailed():
                        self.on_failure(message.group, message.sample, message.attempt, message.error)
        except PeerClosed:
            pass

    async def _generate(self, worker: _Worker, asked: Generate, number: int) -> None:
        has_place = True

        def place(value: bool) -> None:
            nonlocal has_place
            if value is not has_place:
                has_place = value
                self._without_place += -1 if value else 1
                self._post(worker, Placed(asked.place, value))

        is_told = self._engine.capabilities.tells_places
        if is_told:
            place(False)
        request = GenerationRequest(
            request_id=str(next(self._numbers)),
            input_ids=list(asked.input_ids),
            sampling=asked.sampling,
            seed=asked.seed,
            affinity=asked.affinity,
            conversation=f"{worker.number}/{asked.conversation}",
            images=asked.images,
            **({"on_place": place} if is_told else {}),
        )
        reply: Message
        try:
            made = await self._engine.generate(request)
            lists = tuple(made.output_ids), tuple(made.logprobs), tuple(made.versions)
            columns = save(dict(made.columns)) if made.columns else b""
            reply = Generated(*lists, int(made.finish_reason), columns)
        except ValueError as error:
            reply = Unserved(str(error))
        except RunError as error:
            reply = Failed(error.message, error.hints)
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            reply = Unserved("the inference engine has cancelled the request")
        except Exception as error:  # noqa: BLE001 - an engine may raise anything, and it costs an episode
            reply = Unserved("".join(traceback.format_exception(error)))
        finally:
            place(True)
        worker.peer.reply(number, reply)

    def _post(self, worker: _Worker, message: Message) -> None:
        with contextlib.suppress(PeerClosed):
            worker.peer.notify(message)


def _rows(rows: Sequence[int]) -> str:
    """Some rows by their numbers, and how many more there are."""
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"data row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:5]))}{more}"


def _forget(among: dict[Any, Any], key: Any, _: object) -> None:
    among.pop(key, None)
