"""Rollout workers over true connections: the same groups as in one event loop, and what becomes of them otherwise."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from areal_core.background import start_task
from areal_core.config.sections import RolloutSection
from areal_core.data import Generation
from areal_core.errors import RunError
from areal_core.messages.workflows import RunGroup
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout import workers as module
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer, FakeWorkflow
from tests.rollout.worker_parts import HANG_S, Workers, group, read, run, running, segments_of

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.servers import GenerationRequest


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TellingEngine(FakeEngine):
    """Tells a further column of each token."""

    async def generate(self, request: GenerationRequest) -> Generation:
        made = await super().generate(request)
        count = len(request.input_ids) + len(made.output_ids)
        choices = np.arange(count * 6, dtype=np.int16).reshape(count, 2, 3) + request.seed % 100
        return Generation.of(made.sampled, made.finish_reason, {"choices": choices})


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


class Counting(RewardSum):
    """Has counted something since it was asked last, until it is asked."""

    def __init__(self) -> None:
        super().__init__([])
        self.counted = {"judged": 3.0}

    def pop_metrics(self) -> dict[str, float]:
        taken, self.counted = self.counted, {}
        return taken


def test_what_rewards_count_is_told_with_groups_of_training_alone() -> None:
    """An evaluation, which tells no such metrics, must not take away what training has counted beside it."""

    async def check() -> None:
        runner = EpisodeRunner(FakeWorkflow(), FakeEngine(), Counting(), FakeTokenizer())
        data = CountingDataset(7), CountingDataset(3)
        local = GroupRunner(runner, *data, [], RolloutSection(), segments_of("this program"))
        evaluated = await local.run(RunGroup(-1, 0, -1, (0,), group().sampling, True, HANG_S))
        assert evaluated.outcome.counted == {}
        assert (await local.run(group())).outcome.counted == {"judged": 3.0}
        assert (await local.run(group(6))).outcome.counted == {}

    run(check())


class Gated(FakeWorkflow):
    """Tells who has begun, and waits for a word."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run_episode(self, row: Any, context: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
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
        assert said == ["worker-0 was lost; other workers run the episodes of data row 1 again"]

    run(check())


def test_a_worker_that_has_other_rows_than_those_before_it_ends_the_run() -> None:
    """The order of prompts follows from the number of rows; a log that has grown meanwhile has another order."""

    async def check() -> None:
        async with running(FakeWorkflow(), count=1) as (workers, processes, _):
            assert workers.rows == 7
            processes.rows = 8
            await processes.started[0].die()
            with pytest.raises(
                RunError, match=r"worker-0 has 8 rows of the data set .* the workers before it had 7"
            ) as raised:
                await workers.run(group())
            assert "must stay the same" in raised.value.hints[0]
            assert workers.rows == 7

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
                await processes.started[number].die()
                workflow.begun.clear()  # several groups set it in one worker; the next worker has not connected yet
            ended = await asyncio.gather(*under_way, return_exceptions=True)
        causes = [error for error in ended if isinstance(error, RunError)]
        assert causes
        assert "8 rollout workers were lost one after another, and no group ended in between" in str(causes[0])
        assert "the last, worker-0, had data row" in str(causes[0])
        assert "RUN_DIR/logs/" in causes[0].hints[0]
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
        failed = [number for number, each in enumerate(ended) if each.outcome.failed]
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


class Refusing(FakeEngine):
    """Serves no request, for a reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: Any) -> Any:
        raise self._error


def test_an_engine_that_cannot_serve_fails_episodes() -> None:
    async def check() -> None:
        failures: list[Any] = []
        async with running(FakeWorkflow(), Refusing(ValueError("too long"))) as (workers, _, _):
            workers.on_failure = lambda *told: failures.append(told[:3])
            batch, facts = read(await workers.run(group()))
            assert (batch, facts.failed) == (None, 3)
            assert "too long" in facts.failure
            assert sorted(failures) == [(5, sample, attempt) for sample in range(3) for attempt in range(2)]

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
