"""Evaluations: no episode fails for the others, and what fails is told."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from areal_core.config.sections import RolloutSection
from areal_core.data.trajectory import TOKEN_DTYPES
from areal_core.errors import RunError
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.evaluation import Evaluator, play_in_workers
from areal_core.rollout.groups import GroupRunner
from areal_core.sdk import SkippedRowError
from areal_core.servers import SamplingParameters
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer, FakeWorkflow

if TYPE_CHECKING:
    from areal_core.sdk import Dataset


class Broken:
    async def run_episode(self, row: Any, context: Any) -> Any:
        raise ValueError(f"no answer to {row['prompt']}")


def evaluator(
    workflow: Any = None, *, engine: Any = None, dataset: Dataset | None = None, samples: int = 1, **settings: Any
) -> tuple[Evaluator, list[str]]:
    """An evaluator, and what it tells."""
    workflow, engine = workflow or FakeWorkflow(), engine or FakeEngine()
    runner = EpisodeRunner(workflow, engine, RewardSum([]), FakeTokenizer(), **settings)
    section: Any = SimpleNamespace(samples_per_prompt=samples, limit=None)
    told: list[str] = []
    rows = dataset or CountingDataset(40)
    groups = GroupRunner(runner, None, rows, [], RolloutSection(), None)
    made = Evaluator(partial(play_in_workers, groups, SamplingParameters()), len(rows), section)
    made.on_failure = told.append
    return made, told


def test_episodes_of_an_evaluation_that_fail_are_told_with_the_first_cause() -> None:
    async def check() -> None:
        made, told = evaluator(Broken(), dataset=CountingDataset(2), samples=2)
        metrics = await made.run(RolloutSection())
        assert metrics == {"evaluation/episodes": 0.0, "evaluation/failed": 4.0}
        (line,) = told
        assert line.startswith("4 of 4 episodes of the evaluation failed; the first: ")
        assert "no answer to 0" in line

    asyncio.run(check())


def test_a_row_that_a_setting_skips_counts_as_failed_and_its_cause_is_recorded() -> None:
    class Skips:
        async def run_episode(self, row: Any, context: Any) -> Any:
            raise SkippedRowError("too long")

    made, told = evaluator(Skips(), dataset=CountingDataset(1), on_failure=lambda *cause: causes.append(cause))
    causes: list[Any] = []
    assert asyncio.run(made.run(RolloutSection()))["evaluation/failed"] == 1
    assert "too long" in told[0]
    assert causes == [(-1, 0, 0, "data row 0 (counted from 0), sample 0: too long")]


def test_a_reward_is_averaged_over_what_it_judged_and_a_metric_over_all_episodes() -> None:
    class Sometimes(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            episode = await super().run_episode(row, context)
            episode.rewards = {"style": 1.0} if row["prompt"] == "0" else {}
            episode.metrics = {"agents/calls": 2.0} if row["prompt"] == "0" else {}
            return episode

    made, _ = evaluator(Sometimes(), dataset=CountingDataset(4), metric_prefix="agents/")
    metrics = asyncio.run(made.run(RolloutSection()))
    assert (metrics["evaluation/reward/style"], metrics["evaluation/agents/calls"]) == (1.0, 0.5)


def test_a_workflow_cannot_overwrite_a_metric_of_the_evaluation() -> None:
    names = ("reward", "episodes", "failed", "response_length", "reward/style", "agents/calls", "workflow/calls")

    class Evil(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            episode = await super().run_episode(row, context)
            episode.rewards, episode.metrics = {"style": 1.0}, dict.fromkeys(names, -9.0)
            return episode

    honest, _ = evaluator(FakeWorkflow(), dataset=CountingDataset(4))
    evil, _ = evaluator(Evil(), dataset=CountingDataset(4))
    expected = {**asyncio.run(honest.run(RolloutSection())), "evaluation/reward/style": 1.0}
    metrics = asyncio.run(evil.run(RolloutSection()))
    assert {name: value for name, value in metrics.items() if not name.startswith("evaluation/workflow/")} == expected
    added = {f"evaluation/workflow/{name.removeprefix('workflow/')}" for name in names}
    assert {name for name, value in metrics.items() if value == -9.0} == added


def test_an_evaluation_sends_neither_images_nor_wide_columns() -> None:
    """Those of 512 answers about an image were 13 GB in the controller."""

    class Sees(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            episode = await super().run_episode(row, context)
            for trajectory in episode.trajectories:
                count = len(trajectory.tokens["input_ids"])
                trajectory.tokens["routed_experts"] = np.zeros((count, 4, 2), np.uint8)
                trajectory.multimodal["images"] = {"patches": np.zeros((9, 16), np.float32)}
            return episode

    async def check() -> None:
        runner = EpisodeRunner(Sees(), FakeEngine(), RewardSum([]), FakeTokenizer())
        groups = GroupRunner(runner, None, CountingDataset(1), [], RolloutSection(), None)
        played = await play_in_workers(groups, SamplingParameters(), 0, 0, 60.0)
        assert played.episode is not None
        (trajectory,) = played.episode.trajectories
        assert trajectory.tokens.keys() == TOKEN_DTYPES.keys()
        assert not trajectory.multimodal
        assert "finish_reason" in trajectory.sequence

    asyncio.run(check())


@pytest.mark.parametrize("good", [None, 0])
def test_an_evaluation_whose_first_episodes_all_fail_ends_with_the_cause(good: int | None) -> None:
    """Else one whose judge is dead waits for every one of them in turn; where one has succeeded all are played."""

    class AllButOne(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            said.append(made.progress)
            if row["prompt"] != str(good):
                raise ValueError("the judge is gone")
            return await super().run_episode(row, context)

    async def check() -> None:
        rollout = RolloutSection(batch_size=1, group_size=1, max_pending_batches=1, max_consecutive_failures=3)
        if good is None:
            ended = r"3 of 40 episodes of the evaluation ended, 3 failed(?s:.*)the judge is gone"
            with pytest.raises(RunError, match=ended):
                await made.run(rollout)
        else:
            assert (await made.run(rollout))["evaluation/failed"] == 39
            assert "20 of 40 episodes of the evaluation ended, 19 failed" in said
        assert made.progress == ""

    said: list[str] = []
    made, _ = evaluator(AllButOne())
    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.slow
def test_no_episode_fails_because_others_came_before() -> None:
    """A tenth of a second each, one at a time: the mean must not be that of whoever got the place early."""

    async def check() -> None:
        made, told = evaluator(engine=FakeEngine(delay_s=0.1, places=1))
        rollout = RolloutSection(batch_size=40, episode_timeout_s=2)
        assert rollout.episodes_at_once >= 40
        metrics = await made.run(rollout)
        assert (metrics["evaluation/episodes"], metrics["evaluation/failed"]) == (40, 0)
        assert told == []

    asyncio.run(asyncio.wait_for(check(), 60))


def test_as_many_episodes_are_played_at_a_time_as_a_run_has() -> None:
    class Counted(FakeWorkflow):
        running = most = 0

        async def run_episode(self, row: Any, context: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.001)
            self.running -= 1
            return await super().run_episode(row, context)

    async def check() -> None:
        workflow = Counted()
        made, _ = evaluator(workflow)
        rollout = RolloutSection(batch_size=3, group_size=2, max_pending_batches=2)
        assert (await made.run(rollout))["evaluation/episodes"] == 40
        assert workflow.most == rollout.episodes_at_once == 12

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.parametrize(("ends_with", "words"), [(KeyError("answer"), "KeyError: 'answer'"), (None, "SystemExit: 3")])
def test_a_row_that_cannot_be_read_is_a_failed_episode(ends_with: Exception | None, words: str) -> None:
    class Ragged(CountingDataset):
        def __getitem__(self, index: int) -> Any:
            if index != 1:
                return super().__getitem__(index)
            if ends_with is None:
                sys.exit(3)
            raise ends_with

    async def check() -> None:
        made, (told) = evaluator(dataset=Ragged(3))
        metrics = await made.run(RolloutSection())
        assert (metrics["evaluation/episodes"], metrics["evaluation/failed"]) == (2, 1)
        (line,) = told
        assert "held-out row 1 of the data set (counted from 0) cannot be read" in line
        assert words in line

    asyncio.run(asyncio.wait_for(check(), 60))


def test_an_engine_that_dies_ends_the_evaluation_and_all_of_its_episodes() -> None:
    class Dies(FakeEngine):
        async def generate(self, request: Any) -> Any:
            if len(self.requests) == 3:
                raise RunError("the engine has died")
            return await super().generate(request)

    async def check() -> None:
        made, _ = evaluator(engine=Dies(delay_s=60))
        before = asyncio.all_tasks()
        with pytest.raises(RunError, match="the engine has died"):
            await made.run(RolloutSection())
        assert asyncio.all_tasks() == before, "siblings went on"

    asyncio.run(asyncio.wait_for(check(), 60))


def test_an_evaluation_whose_requests_get_no_place_for_ever_ends_with_the_reason() -> None:
    async def check() -> None:
        made, _ = evaluator(engine=FakeEngine(places=0))
        rollout = RolloutSection(batch_size=2, group_size=2, max_pending_batches=1, stall_timeout_s=0.3)
        with pytest.raises(RunError, match=r"stall_timeout_s: 0.3; those that wait for a slot"):
            await made.run(rollout)

    asyncio.run(asyncio.wait_for(check(), 60))
