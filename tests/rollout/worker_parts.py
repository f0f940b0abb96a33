"""Rollout workers over true connections, for tests."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.sections import RolloutSection
from areal_core.data import PackedBatch
from areal_core.interfaces.inference import Grant, ServerLostError, SlotRequest
from areal_core.interfaces.slots import SlotLease
from areal_core.ledger.segments import SegmentWriter, read_record
from areal_core.messages.workflows import RunGroup, Welcome, WorkflowsReady
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteSlots, WorkerService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.runtime.rpc import connect, private_folder
from areal_core.servers import SamplingParameters
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from areal_core.data import Generation
    from areal_core.errors import RunError
    from areal_core.interfaces.inference import LeaseHolder, Slots
    from areal_core.messages.workflows import GroupOutcome, GroupResult
    from areal_core.runtime.rpc import Peer
    from areal_core.sdk import RolloutWorkflow
    from areal_core.servers import GenerationRequest

HANG_S = 60.0
GRANT = Grant("server-0", "http://there", 3, "run-", labels_tokens=True, context=64, vocabulary=256)
LIVES = itertools.count()


def segments_of(name: str) -> SegmentWriter:
    """What a worker writes, below the current folder as if that were a run's."""
    return SegmentWriter(Path.cwd() / "segments", Path.cwd(), f"{name}-{next(LIVES)}", print)


def read(ended: GroupResult) -> tuple[PackedBatch | None, GroupOutcome]:
    """The trajectories of a group that has ended, and the facts about it."""
    data = None if ended.record is None else read_record(Path.cwd(), ended.record)
    return None if data is None else PackedBatch.from_bytes(data), ended.outcome


class SlotQueue:
    """The slots of one server, given out in order of arrival; a `Slots`."""

    def __init__(self) -> None:
        self._waiting: deque[LeaseHolder] = deque()
        self._held: set[LeaseHolder] = set()
        self._grant: Grant | None = None
        self._count = 0
        self._failure: RunError | None = None

    def open(self, grant: Grant | None, count: int) -> None:
        """From now on so many slots are given out, each of them this one; None: none for now."""
        self._grant, self._count = grant, count
        self._wake()

    def fail(self, error: RunError) -> None:
        """There will never be a slot again, and those that are held are lost."""
        self._grant, self._failure = None, error
        for holder in self._held:
            holder.lose()
        self._wake()

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`."""
        self._waiting.append(holder)
        self._wake()

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        if holder in self._held:
            self._held.remove(holder)
            self._wake()
        elif holder in self._waiting:
            self._waiting.remove(holder)

    def _wake(self) -> None:
        while self._waiting and self._failure is not None:
            self._waiting.popleft().fail(self._failure)
        while self._waiting and self._grant is not None and len(self._held) < self._count:
            holder = self._waiting.popleft()
            self._held.add(holder)
            holder.give(self._grant)


class Client:
    """An `InferenceClient`: asks an engine of this process within a slot that the controller has given."""

    def __init__(self, engine: FakeEngine, slots: Slots) -> None:
        self.capabilities = engine.capabilities
        self._engine, self._slots = engine, slots

    async def generate(self, request: GenerationRequest) -> Generation:
        while True:
            try:
                async with SlotLease(self._slots, SlotRequest(), request.on_slot_change) as grant:
                    assert grant == GRANT
                    return await self._engine.generate(replace(request, on_slot_change=lambda _: None))
            except ServerLostError:
                pass

    async def close(self) -> None:
        pass


class Worker:
    """A worker in a task of this event loop."""

    def __init__(self, name: str, address: str, workflow: RolloutWorkflow, engine: FakeEngine, rows: int) -> None:
        self.name = name
        self.rows = rows
        self.peer: Peer | None = None
        self._task = asyncio.ensure_future(self._serve(address, workflow, engine))

    async def _serve(self, address: str, workflow: RolloutWorkflow, engine: FakeEngine) -> None:
        self.peer = peer = await connect(address, HANG_S, self.name)
        assert isinstance(await peer.receive(), Welcome)
        slots = RemoteSlots(peer)
        runner = EpisodeRunner(workflow, Client(engine, slots), RewardSum([]), FakeTokenizer(), max_retries=1)
        data = CountingDataset(self.rows), CountingDataset(3)
        service = WorkerService(peer, GroupRunner(runner, *data, [], RolloutSection(), segments_of(self.name)), slots)
        peer.notify(WorkflowsReady(*map(len, data)))
        await service.serve()

    async def die(self) -> None:
        """As by the out-of-memory killer."""
        if self.peer is not None:
            await self.peer.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Workers:
    """Starts them, and those again that have died, as the driver does."""

    def __init__(self, address: str, workflow: RolloutWorkflow, engine: FakeEngine) -> None:
        self.started: list[Worker] = []
        self._of = address, workflow, engine
        self.restarts = True
        self.rows = 7
        """Rows of the training data that a worker which starts from now on has."""

    def start(self, name: str) -> None:
        worker = Worker(name, *self._of, self.rows)
        self.started.append(worker)
        worker._task.add_done_callback(lambda _: self.start(name) if self.restarts else None)


@asynccontextmanager
async def running(
    workflow: RolloutWorkflow, engine: Any = None, count: int = 2, slots: SlotQueue | None = None
) -> AsyncIterator[tuple[RolloutWorkers, Workers, list[str]]]:
    """Workers that are ready, who starts them, and what is told of them."""
    said = list[str]()
    if slots is None:
        slots = SlotQueue()
        slots.open(GRANT, 1000)
    with private_folder() as folder:
        made = RolloutWorkers(
            f"unix:{folder / 'socket'}",
            slots,
            count=count,
            start_timeout_s=HANG_S,
            welcome=Welcome(trains=True),
            timeline=folder / "groups.jsonl",
            log=said.append,
        )
        processes = Workers(await made.listen(), workflow, engine or FakeEngine())
        try:
            for number in range(count):
                processes.start(f"worker-{number}")
            await made.start()
            yield made, processes, said
        finally:
            processes.restarts = False
            await made.close()
            for worker in processes.started:
                await worker.die()


def group(number: int = 5, timeout_s: float = HANG_S) -> RunGroup:
    return RunGroup(number, number % 7, 0, (0, 1, 2), SamplingParameters(max_new_tokens=8), False, timeout_s)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, HANG_S))
