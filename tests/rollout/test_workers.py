"""Rollout workers over true connections: the same groups as in one event loop, and what becomes of them otherwise."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.background import start_task
from areal_core.config.sections import RolloutSection
from areal_core.data import PackedBatch
from areal_core.errors import RunError
from areal_core.interfaces import SamplingParameters
from areal_core.ledger.segments import SegmentWriter, read_record
from areal_core.messages import connect, private_folder
from areal_core.messages.workflows import RunGroup, Welcome, WorkflowsReady
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout import workers as module
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.rollout.remote import RemoteEngine, WorkerService
from areal_core.rollout.workers import RolloutWorkers
from areal_core.testing.fakes import CountingDataset, FakeEngine, FakeTokenizer, FakeWorkflow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from areal_core.data import Generation
    from areal_core.interfaces import GenerationRequest, RolloutWorkflow
    from areal_core.messages import Peer
    from areal_core.messages.workflows import GroupEnded, GroupFacts

HANG_S = 60.0
LIVES = itertools.count()


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def segments_of(name: str) -> SegmentWriter:
    """What a worker writes, below the current folder as if that were a run's."""
    return SegmentWriter(Path.cwd() / "segments", Path.cwd(), f"{name}-{next(LIVES)}", print)


def read(ended: GroupEnded) -> tuple[PackedBatch | None, GroupFacts]:
    """The trajectories of a group that has ended, and the facts about it."""
    data = None if ended.record is None else read_record(Path.cwd(), ended.record)
    return None if data is None else PackedBatch.from_bytes(data), ended.facts


class Worker:
    """A worker in a task of this event loop."""

    def __init__(self, name: str, address: str, workflow: RolloutWorkflow) -> None:
        self.name = name
        self.peer: Peer | None = None
        self._task = asyncio.ensure_future(self._serve(address, workflow))

    async def _serve(self, address: str, workflow: RolloutWorkflow) -> None:
        self.peer = peer = await connect(address, HANG_S, self.name)
        welcome = await peer.receive()
        engine = RemoteEngine(peer, tells_places=welcome.tells_places, images=welcome.images)
        runner = EpisodeRunner(workflow, engine, RewardSum([]), FakeTokenizer(), max_retries=1)
        data = CountingDataset(7), CountingDataset(3)
        service = WorkerService(peer, GroupRunner(runner, *data, [], RolloutSection(), segments_of(self.name)), engine)
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

    def __init__(self, address: str, workflow: RolloutWorkflow) -> None:
        self.started: list[Worker] = []
        self._address, self._workflow = address, workflow
        self.restarts = True

    def start(self, name: str) -> None:
        worker = Worker(name, self._address, self._workflow)
        self.started.append(worker)
        worker._task.add_done_callback(lambda _: self.start(name) if self.restarts else None)


@asynccontextmanager
async def running(
    workflow: RolloutWorkflow, engine: Any = None, count: int = 2
) -> AsyncIterator[tuple[RolloutWorkers, Workers, list[str]]]:
    """Workers that are ready, who starts them, and what is told of them."""
    said = list[str]()
    with private_folder() as folder:
        made = RolloutWorkers(
            f"unix:{folder / 'socket'}",
            engine or FakeEngine(),
            count=count,
            start_timeout_s=HANG_S,
            welcome=Welcome(trains=True, evaluates=True, tells_places=True, images=False),
            tell=said.append,
        )
        processes = Workers(await made.listen(), workflow)
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


class TellingEngine(FakeEngine):
    """Tells a further column of each token."""

    async def generate(self, request: GenerationRequest) -> Generation:
        made = await super().generate(request)
        count = len(request.input_ids) + len(made.output_ids)
        choices = torch.arange(count * 6, dtype=torch.int16).view(count, 2, 3) + request.seed % 100
        return replace(made, columns={"choices": choices})


@pytest.mark.parametrize("engine", [FakeEngine, TellingEngine])
def test_groups_are_those_of_one_event_loop(engine: type[FakeEngine]) -> None:
    async def check() -> None:
        runner = EpisodeRunner(FakeWorkflow(), engine(), RewardSum([]), FakeTokenizer())
        data = CountingDataset(7), CountingDataset(3)
        local = GroupRunner(runner, *data, [], RolloutSection(), segments_of("this program"))
        async with running(FakeWorkflow(), engine()) as (workers, _, _):
            assert (workers.rows, workers.held_out_rows) == (7, 3)
            for number in range(4):
                wanted, facts = read(await local.run(group(number)))
                found, told = read(await workers.run(group(number)))
                assert told == facts
                assert wanted is not None
                assert found is not None
                assert found.to_bytes() == wanted.to_bytes()
                assert ("choices" in found) is (engine is TellingEngine)

    run(check())


class Gated(FakeWorkflow):
    """Tells who has begun, and waits for a word."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = 0

    async def run_episode(self, row: Any, context: Any) -> Any:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().run_episode(row, context)


def test_what_a_lost_worker_had_is_begun_again_elsewhere() -> None:
    async def check() -> None:
        workflow = Gated()
        async with running(workflow) as (workers, processes, said):
            under_way = [asyncio.ensure_future(workers.run(group(number))) for number in (1, 2)]
            await workflow.begun.wait()
            await processes.started[0].die()
            workflow.go_on.set()
            for ended in under_way:
                batch, facts = read(await ended)
                assert batch is not None
                assert len(facts.rewards) == 3
            while len(processes.started) < 3:
                await asyncio.sleep(0.01)
        assert said == ["worker-0 was lost; the episodes of data row 1 are begun again"]

    run(check())


def test_a_group_that_loses_one_worker_after_another_fails() -> None:
    async def check() -> None:
        failures = []
        workflow = Gated()
        async with running(workflow, count=1) as (workers, processes, _):
            workers.on_failure = lambda *told: failures.append(told)
            under_way = asyncio.ensure_future(workers.run(group()))
            for number in range(module.LOSSES_AMONG_OTHERS + module.LOSSES_ALONE):
                await workflow.begun.wait()
                workflow.begun.clear()
                await processes.started[number].die()
            batch, facts = read(await under_way)
        assert batch is None
        assert facts.failed == 3
        assert (
            facts.failure == "4 rollout workers were lost with this prompt, data row 5, worker-0 the last: see its log"
        )
        assert failures == [(5, 0, 4, facts.failure)]

    run(check())


def test_workers_that_are_lost_one_after_another_end_the_run_and_say_with_what() -> None:
    async def check() -> None:
        workflow = Gated()
        async with running(workflow, count=1) as (workers, processes, said):
            under_way = [asyncio.ensure_future(workers.run(group(number))) for number in range(7)]
            for number in range(module.LOSSES_IN_A_ROW):
                await workflow.begun.wait()
                workflow.begun.clear()
                await processes.started[number].die()
            ended = await asyncio.gather(*under_way, return_exceptions=True)
        causes = [error for error in ended if isinstance(error, RunError)]
        assert causes
        assert "8 rollout workers were lost one after another, and no group ended in between" in str(causes[0])
        assert "the last, worker-0, had data row" in str(causes[0])
        assert "areal logs" in causes[0].hints[0]
        assert "data rows 0, 1, 2, 3, 4 and 2 more" in said[0]

    run(check())


class Poisoned(FakeWorkflow):
    """One row ends its worker; the others take a moment, so that they are there when it does."""

    def __init__(self) -> None:
        self.processes: Workers | None = None

    async def run_episode(self, row: Any, context: Any) -> Any:
        if row["answer"] == "5":
            assert self.processes is not None
            await asyncio.sleep(0.02)
            start_task(self.processes.started[-1].die(), "the end of a worker")
            await asyncio.sleep(HANG_S)
        await asyncio.sleep(0.1)
        return await super().run_episode(row, context)


def test_a_prompt_that_ends_workers_takes_no_other_with_it() -> None:
    async def check() -> None:
        workflow = Poisoned()
        async with running(workflow, count=1) as (workers, processes, _):
            workflow.processes = processes
            ended = await asyncio.gather(*(workers.run(group(number)) for number in range(7)))
        failed = [number for number, each in enumerate(ended) if each.facts.failed]
        assert failed == [5]
        assert len(processes.started) == 1 + module.LOSSES_AMONG_OTHERS + module.LOSSES_ALONE

    run(check())


class Odd(FakeEngine):
    """Raises what no engine should."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("error", [KeyError("lost"), asyncio.CancelledError()])
def test_whatever_an_engine_raises_costs_the_episode_and_not_the_run(error: BaseException) -> None:
    async def check() -> None:
        async with running(FakeWorkflow(), Odd(error)) as (workers, _, _):
            _, facts = read(await workers.run(group()))
        assert facts.failed == 3
        assert "lost" in facts.failure or "cancelled" in facts.failure

    run(check())


def test_a_group_that_nobody_waits_for_is_cancelled_in_its_worker() -> None:
    async def check() -> None:
        workflow = Gated()
        async with running(workflow) as (workers, _, _):
            under_way = asyncio.ensure_future(workers.run(group()))
            await workflow.begun.wait()
            under_way.cancel()
            await asyncio.gather(under_way, return_exceptions=True)
            while workflow.cancelled < 3:
                await asyncio.sleep(0.01)

    run(check())


class Refusing(FakeEngine):
    """Serves no request, for a reason; or dies."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: Any) -> Any:
        raise self._error


def test_an_engine_that_cannot_serve_fails_episodes_and_one_that_has_died_the_run() -> None:
    async def check() -> None:
        failures: list[Any] = []
        async with running(FakeWorkflow(), Refusing(ValueError("too long"))) as (workers, _, _):
            workers.on_failure = lambda *told: failures.append(told[:3])
            batch, facts = read(await workers.run(group()))
            assert (batch, facts.failed) == (None, 3)
            assert "too long" in facts.failure
            assert sorted(failures) == [(5, sample, attempt) for sample in range(3) for attempt in range(2)]
        async with running(FakeWorkflow(), Refusing(RunError("the engine is gone"))) as (workers, _, _):
            with pytest.raises(RunError, match="the engine is gone"):
                await workers.run(group())

    run(check())


def test_the_time_in_which_a_request_waits_for_its_place_is_not_the_episodes() -> None:
    class Late(FakeEngine):
        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.5)  # without a place
            waiting.append(workers.waiting)
            return await super().generate(request)

    async def check() -> None:
        nonlocal workers
        async with running(FakeWorkflow(), Late()) as (workers, _, _):
            batch, _ = read(await workers.run(group(timeout_s=0.25)))
            assert batch is not None, "its clock stood still"
            assert max(waiting) == 3
            assert workers.waiting == 0

    waiting: list[int] = []
    workers: Any = None
    run(check())


def test_many_workers_may_be_lost_at_once() -> None:
    """Eight would end a run of four; of eight workers twice as many may go before something is wrong with the work."""

    async def check() -> None:
        workflow = Gated()
        async with running(workflow, count=8) as (workers, processes, said):
            under_way = [asyncio.ensure_future(workers.run(group(number))) for number in range(7)]
            await workflow.begun.wait()
            await asyncio.gather(*(process.die() for process in processes.started[:8]))
            workflow.go_on.set()
            for ended in under_way:
                batch, _ = read(await ended)
                assert batch is not None
            while len(processes.started) < 16:
                await asyncio.sleep(0.01)
        assert len(said) == 8

    run(check())
