"""Whatever a data set or a workflow does wrong costs its group, by name, and nothing else."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from areal_core.data import Episode, Trajectory
from areal_core.data.sampler import PromptSampler
from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.messages.workflows import RunGroup
from areal_core.rollout.episodes import EpisodeError, EpisodeRunner
from areal_core.runs.controller import LOGGED_CAUSES, _logging_each_cause
from areal_core.runtime.event_loops import run_through_exits
from areal_core.servers import SamplingParameters
from areal_testing.fakes import CountingDataset, FakeEngine, FakeWorkflow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.data import Generation
    from areal_core.ledger.store import Ledger
    from areal_core.rollout.controller import RolloutController
    from areal_core.sdk import WorkflowContext
    from areal_core.servers import GenerationRequest

    Build = Callable[..., tuple[RolloutController, Ledger]]
    Audited = Callable[[Path], list[str]]


class RaggedDataset(CountingDataset):
    """Some rows cannot be read."""

    error: type[BaseException] = KeyError

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index % 3 == 0:
            raise self.error("column_that_is_not_there")
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, BaseException])
def test_a_row_that_cannot_be_read_fails_its_group_and_says_so(
    tmp_path: Path, error: type[BaseException], build: Build, audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RaggedDataset, "error", error)

    async def run(**policy: Any) -> RolloutController:
        controller, ledger = build(tmp_path, **policy)
        controller._runner._dataset = RaggedDataset(7)
        controller.start()
        try:
            for step in range(3):
                batch, _ = await controller.next_batch(step)
                assert batch is not None
                assert 0 not in {row % 3 for row in batch["prompt_id"][:, 0].tolist()}
                await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
            rows = ledger.database.execute("SELECT error FROM failures").fetchall()
            assert all("column_that_is_not_there" in error and "cannot be read" in error for (error,) in rows)
            assert rows
        finally:
            await controller.close()
        return controller

    asyncio.run(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == []
    with pytest.raises(
        RunError, match=r"groups failed one after another(?s:.*)row \d of the data set \(counted from 0\)"
    ):
        asyncio.run(asyncio.wait_for(run(max_consecutive_failures=1), 60))


def spoiled(field: str, value: Any) -> Callable[[Episode], Any]:
    """An episode with one thing wrong."""

    def spoil(episode: Episode) -> Any:
        trajectory = episode.trajectories[0]
        match field:
            case "nothing":
                return value
            case "tokens":
                name, wrong = value
                trajectory.tokens[name] = np.full_like(trajectory.tokens[name], wrong)
            case "column":
                trajectory.tokens[value] = torch.zeros(len(trajectory))
            case "kind":
                trajectory.tokens["advantage"] = np.zeros(len(trajectory), value)
            case "finish_reason":
                trajectory.sequence.clear()
            case _:
                setattr(episode, field, value)
        return episode

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled("nothing", None), "must return an Episode"),
        (spoiled("reward", float("nan")), "Episode.reward is nan"),
        (spoiled("reward", 1e39), "finite float32"),
        (spoiled("reward", "three"), "Episode.reward is 'three'"),
        (spoiled("reward", 10**400), "Episode.reward"),
        (spoiled("rewards", {"style": float("inf")}), "rewards\\['style'\\]"),
        (spoiled("rewards", [1.0]), "Episode.rewards"),
        (spoiled("rewards", {"\ud800": float("nan")}), "Episode.rewards"),
        *(
            (spoiled("rewards", {name: 1.0, "style": 1.0}), f"Episode.rewards has {name}, which areal's own metrics")
            for name in ("all_episodes", "mean", "std", "groups_all_equal")
        ),
        (spoiled("metrics", {"reward": float("nan")}), "metrics\\['reward'\\]"),
        (spoiled("metrics", [1.0]), "Episode.metrics"),
        (spoiled("text", b"bytes"), "Episode.text"),
        (spoiled("trajectories", [None]), "trajectories\\[0\\] is None"),
        (spoiled("trajectories", []), "at least one"),
        (spoiled("tokens", ("logprobs", float("nan"))), "tokens\\['logprobs'\\] holds NaN"),
        (spoiled("tokens", ("input_ids", -7)), "the token -7"),
        (spoiled("tokens", ("versions", 12)), "versions hold \\[12\\]"),
        (spoiled("finish_reason", None), "finish_reason"),
        (spoiled("column", "advantage"), "tokens\\['advantage'\\] differ"),
        (spoiled("kind", np.longdouble), "tokens\\['advantage'\\] is of float128, which PyTorch"),
        (spoiled("kind", "U3"), "tokens\\['advantage'\\] is of <U3, which PyTorch"),
    ],
)
def test_one_bad_episode_costs_its_group_and_names_its_field(
    tmp_path: Path, spoil: Callable[[Episode], Any], message: str, build: Build, audited: Audited
) -> None:
    class Spoils(FakeWorkflow):
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            episode = await super().run_episode(row, context)
            is_bad = row["prompt"] == "2" and context.sample_index == 1
            return spoil(episode) if is_bad else episode  # type: ignore[no-any-return]

    async def run() -> None:
        controller, ledger = build(tmp_path, Spoils(), depth=3, max_staleness=2)
        controller.start()
        for step in range(4):
            batch, _ = await controller.next_batch(step)
            assert batch is not None
            assert bool(torch.isfinite(batch["reward"]).all())
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        errors = ledger.database.execute("SELECT error FROM failures").fetchall()
        assert errors
        assert all(re.search(message, error) for (error,) in errors), errors
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == []


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), BaseException("odd"), GeneratorExit(), ValueError("\ud800")]
)
def test_a_workflow_cannot_end_the_process(
    tmp_path: Path, error: BaseException, build: Build, audited: Audited
) -> None:
    class Exits(FakeWorkflow):
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            if row["prompt"] == "1":
                raise error
            return await super().run_episode(row, context)

    async def run() -> None:
        controller, _ = build(tmp_path, Exits(), retries=1)
        controller.start()
        for step in range(3):
            await controller.next_batch(step)
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == []


def test_a_task_of_a_workflow_cannot_end_the_process(tmp_path: Path, build: Build, audited: Audited) -> None:
    """asyncio lets SystemExit out of any task, and out of the loop."""

    class Leaves(FakeWorkflow):
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            async def leave() -> None:
                await asyncio.sleep(0)
                raise SystemExit(0)

            if row["prompt"] == "1":
                await asyncio.gather(leave())
            asyncio.ensure_future(leave())  # noqa: RUF006 - nobody waits for it
            return await super().run_episode(row, context)

    async def run() -> None:
        controller, ledger = build(tmp_path, Leaves())
        controller.start()
        for step in range(3):
            await controller.next_batch(step)
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        assert any("SystemExit: 0" in error for (error,) in ledger.database.execute("SELECT error FROM failures"))
        await controller.close()

    run_through_exits(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == []


def run_failing(play: Callable[[int], Any], retries: int = 2) -> tuple[list[tuple[int, str]], str]:
    """An episode whose attempts do this, given their number: the attempts that failed, and what all came to."""
    failed: list[tuple[int, str]] = []

    class Fails:
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            await play(len(failed))
            generation = await context.generate([5, 6])
            return Episode([Trajectory.from_generation([5, 6], generation)], 0.0)

    def note(group: int, sample: int, attempt: int, error: str) -> None:
        failed.append((attempt, error))

    runner = EpisodeRunner(Fails(), FakeEngine(), scorer=None, tokenizer=None, max_retries=retries, on_failure=note)
    playing = runner.run({}, RunGroup(0, 0, 0, (0,), SamplingParameters(), timeout_s=60), 0)
    try:
        asyncio.run(playing)
    except EpisodeError as error:
        return failed, str(error)
    return failed, ""


@pytest.mark.parametrize("kind", ["task", "raised"])
def test_an_episode_that_cancels_itself_is_tried_again(kind: str) -> None:
    async def cancels(attempt: int, until: int) -> None:
        if attempt < until and kind == "raised":
            raise asyncio.CancelledError
        if attempt < until:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(10)

    words = "the workflow cancelled its own task"
    assert run_failing(lambda attempt: cancels(attempt, 2)) == ([(0, words), (1, words)], "")
    assert run_failing(lambda attempt: cancels(attempt, 9)) == ([(0, words), (1, words), (2, words)], words)


def test_a_request_that_a_failed_attempt_left_behind_stops_the_next_ones_clock() -> None:
    """As it stops that of its own attempt: none of the two works against the limit meanwhile."""
    places = asyncio.Event()

    class Full(FakeEngine):
        async def generate(self, request: GenerationRequest) -> Generation:
            request.on_slot_change(False)
            await places.wait()
            request.on_slot_change(True)
            return await super().generate(request)

    class Leaves:
        attempts = 0

        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            self.attempts += 1
            if self.attempts == 1:
                waiting = asyncio.ensure_future(context.generate([1]))
                await asyncio.sleep(0)
                self.waiting = waiting
                raise ValueError("a tool failed")
            await asyncio.sleep(0.6)  # twice the limit, and nobody has a place yet
            places.set()
            await self.waiting
            generation = await context.generate([5, 6])
            return Episode([Trajectory.from_generation([5, 6], generation)], 0.0)

    async def run() -> list[str]:
        problems: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: problems.append(str(told)))
        runner = EpisodeRunner(Leaves(), Full(), scorer=None, tokenizer=None, max_retries=1)
        sampling = SamplingParameters(max_new_tokens=4)
        await runner.run({}, RunGroup(0, 0, 0, (0,), sampling, timeout_s=0.3), 0)
        await asyncio.sleep(0.4)
        return problems

    assert asyncio.run(run()) == []


def test_a_run_that_ends_in_an_episode_that_cancels_itself_is_not_swallowed() -> None:
    class Waits:
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            await asyncio.sleep(60)
            raise AssertionError("unreachable")

    async def run() -> None:
        runner = EpisodeRunner(Waits(), FakeEngine(), scorer=None, tokenizer=None, max_retries=5)
        work = runner.run({}, RunGroup(0, 0, 0, (0,), SamplingParameters()), 0)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()

    asyncio.run(run())


def test_of_errors_in_a_group_the_last_line_tells_the_groups_words_and_the_first() -> None:
    async def several(attempt: int) -> None:
        raise ExceptionGroup("two tools failed", [ExceptionGroup("inner", [ValueError("the first")]), KeyError("b")])

    failed, _ = run_failing(several, retries=0)
    assert failed[0][1].splitlines()[-1] == "two tools failed (2 sub-exceptions): ValueError: the first"


def test_each_cause_of_failed_episodes_is_logged_once_up_to_a_limit() -> None:
    lines: list[str] = []
    failed = _logging_each_cause(lambda *_: None, lines.append, PromptSampler(8, 0, shuffle=False))
    causes = [f"Traceback\nValueError: of kind {letter}" for letter in "abcdefghij"]
    for cause in [*causes, *causes]:
        failed(5, 0, 0, cause)
    failed(-1, 0, 0, "ValueError: of an evaluation")
    assert len(lines) == LOGGED_CAUSES
    assert lines[0].startswith("an episode of data row 5 failed: ValueError: of kind a; ")
    assert lines[-1].endswith("; further causes are in the ledger only")
    assert not any("the ledger" in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"input_ids": [1.5]}, "float"),
        ({"input_ids": ["1"]}, "str"),
        ({"input_ids": [1], "max_new_tokens": 1.5}, "float"),
        ({"input_ids": [1], "max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_what_is_asked_of_an_engine_is_checked_before(asked: dict[str, Any], error: str):
    class Asks:
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            await context.generate(**asked)
            raise AssertionError("unreachable")

    engine = FakeEngine()
    runner = EpisodeRunner(Asks(), engine, scorer=None, tokenizer=None)
    with pytest.raises(EpisodeError, match=error):
        asyncio.run(runner.run({}, RunGroup(0, 0, 0, (0,), SamplingParameters()), 0))
    assert engine.requests == []


def test_a_workflow_may_end_one_answer_at_a_text_of_its_own():
    class Asks:
        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            await context.generate([5, 6], stop=["</tool>"], max_new_tokens=3)
            generation = await context.generate([5, 6])
            return Episode([Trajectory.from_generation([5, 6], generation)], 0.0)

    engine = FakeEngine()
    runner = EpisodeRunner(Asks(), engine, scorer=None, tokenizer=None)
    sampling = SamplingParameters(stop=("\n\n",))
    asyncio.run(runner.run({}, RunGroup(0, 0, 0, (0,), sampling), 0))
    asked = [(request.sampling.stop, request.sampling.max_new_tokens) for request in engine.requests]
    assert asked == [(("\n\n", "</tool>"), 3), (("\n\n",), 256)]
