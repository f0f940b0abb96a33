"""Clocks of episodes run only while none of their requests waits for a place in the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.rollout import clocks
from areal_core.rollout.clocks import EpisodeClock
from areal_testing.fakes import FakeEngine, FakeWorkflow
from areal_testing.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.ledger.store import Ledger
    from areal_core.rollout.controller import RolloutController

    Build = Callable[..., tuple[RolloutController, Ledger]]


def failures(controller: RolloutController, ledger: Ledger) -> list[str]:
    controller._buffer.write()
    return [error for (error,) in ledger.database.execute("SELECT error FROM failures")]


async def play_a_batch(controller: RolloutController, ledger: Ledger) -> None:
    """One batch, in which no episode failed."""
    batch, metrics = await controller.next_batch(0)
    assert batch is not None
    assert metrics.get("groups/failed", 0) == 0
    assert failures(controller, ledger) == []
    await controller.close()


class LosesItsServers(FakeEngine):
    """Every request has a place at once, loses it, and has another one when the servers are back."""

    def __init__(self, *, at_first: bool = True) -> None:
        super().__init__()
        self.are_back = asyncio.Event()
        self._at_first = at_first

    async def generate(self, request: Any) -> Any:
        if self._at_first:
            request.on_slot_change(True)
        request.on_slot_change(False)
        await self.are_back.wait()
        return await super().generate(request)

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        self.are_back.set()


@pytest.mark.parametrize("at_first", [True, False])
def test_waiting_for_lost_servers_is_not_the_episodes_time(tmp_path: Path, build: Build, at_first: bool) -> None:
    """Whether they were lost under its requests, or before."""

    async def run() -> None:
        engine = LosesItsServers(at_first=at_first)
        controller, ledger = build(tmp_path, engine=engine, batch_size=16, group_size=8, episode_timeout_s=0.3)
        controller.start()
        asyncio.get_running_loop().call_later(1.0, engine.are_back.set)
        await play_a_batch(controller, ledger)

    run_virtually(asyncio.wait_for(run(), 60))


def test_the_time_in_which_an_engine_has_given_its_memory_away_is_not_the_episodes(
    tmp_path: Path, build: Build
) -> None:
    """Trainer and servers on one GPU in turns: requests wait for the next weights."""

    async def run() -> None:
        controller, ledger = build(tmp_path, engine=LosesItsServers(), episode_timeout_s=0.3)
        controller.start()
        await asyncio.sleep(1.0)
        await controller.sync(WeightUpdate(1, tmp_path), 0)
        await play_a_batch(controller, ledger)

    run_virtually(asyncio.wait_for(run(), 60))


def test_waiting_behind_others_is_not_the_episodes_time(tmp_path: Path, build: Build) -> None:
    """64 episodes of a tenth of a second each, two at a time: the last ones wait for three seconds."""

    async def run() -> None:
        engine = FakeEngine(delay_s=0.1, places=2)
        controller, ledger = build(tmp_path, engine=engine, batch_size=8, group_size=4, episode_timeout_s=0.5)
        controller.start()
        await play_a_batch(controller, ledger)

    run_virtually(asyncio.wait_for(run(), 60))


def test_what_waits_for_a_place_for_ever_ends_the_run(tmp_path: Path, build: Build) -> None:
    async def run() -> None:
        controller, _ = build(tmp_path, engine=FakeEngine(places=0), episode_timeout_s=0.1, stall_timeout_s=0.5)
        controller.start()
        with pytest.raises(RunError, match=r"stall_timeout_s(?s:.*)16 of 16 episodes wait for a slot of a server"):
            await controller.next_batch(0)
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 60))


def test_an_episode_that_hangs_with_a_place_or_without_a_request_is_overdue(tmp_path: Path, build: Build) -> None:
    """Also after it has waited for a place for longer than it may take."""

    class Hangs(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            await super().run_episode(row, context)
            await asyncio.Event().wait()

    async def run(engine: FakeEngine, workflow: Any) -> None:
        folder = tmp_path / type(workflow).__name__
        controller, ledger = build(folder, workflow, engine=engine, episode_timeout_s=0.3, max_consecutive_failures=1)
        controller.start()
        with pytest.raises(RunError, match=r"rollout.episode_timeout_s: 0.3"):
            await controller.next_batch(0)
        assert failures(controller, ledger)
        await controller.close()

    run_virtually(asyncio.wait_for(run(FakeEngine(delay_s=0.4, places=1), Hangs()), 60))
    run_virtually(asyncio.wait_for(run(FakeEngine(delay_s=60), FakeWorkflow()), 60))


@pytest.mark.parametrize(
    ("places", "is_overdue"), [([False, False], False), ([True, False], False), ([True, True], True)]
)
def test_one_request_that_waits_is_enough_for_the_clock_to_stand_still(places: list[bool], is_overdue: bool) -> None:
    async def run() -> None:
        clock = EpisodeClock(0.2)

        async def ask(has_slot: bool) -> None:
            with clock.request() as on_slot_change:
                on_slot_change(has_slot)
                await asyncio.sleep(0.6)

        async def episode() -> None:
            await asyncio.gather(*(ask(has_slot) for has_slot in places))

        assert not clock.waits
        if is_overdue:
            with pytest.raises(TimeoutError):
                await clock.run(episode())
        else:
            await clock.run(episode())
        assert not clock.waits

    run_virtually(run())


def test_time_before_and_behind_a_wait_adds_up() -> None:
    async def run() -> None:
        clock, waited = EpisodeClock(0.5), asyncio.Event()

        async def episode() -> None:
            for _ in range(3):
                await asyncio.sleep(0.2)
                with clock.request() as on_slot_change:
                    on_slot_change(False)
                    await asyncio.sleep(0.4)
                    waited.set()
            await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await clock.run(episode())
        assert waited.is_set()

    run_virtually(asyncio.wait_for(run(), 20))


def test_a_cancellation_that_was_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "AGAIN_S", 0.05)

    async def stubborn() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        await asyncio.sleep(60)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await EpisodeClock(0.05).run(stubborn())

    run_virtually(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("is_overdue", [False, True])
def test_who_ends_the_caller_ends_the_episode(is_overdue: bool) -> None:
    """An episode that is overdue in this moment is not an episode that failed."""

    async def run() -> None:
        clock, has_ended = EpisodeClock(), asyncio.Event()

        async def episode() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                has_ended.set()

        running = asyncio.ensure_future(clock.run(episode()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if is_overdue:
            clock._cancel()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert has_ended.is_set()

    run_virtually(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("how", ["its task", "what it waits for"])
def test_a_workflow_that_cancels_itself_fails_its_group(tmp_path: Path, build: Build, how: str) -> None:
    class CancelsItself(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            if how == "its task":
                task: Any = asyncio.current_task()
                task.cancel()
                await asyncio.sleep(1)
            waited = asyncio.get_running_loop().create_future()
            waited.cancel()
            await waited

    async def run() -> None:
        controller, ledger = build(tmp_path, CancelsItself(), max_consecutive_failures=2)
        controller.start()
        with pytest.raises(RunError, match=r"2 prompt groups failed(?s:.*)the workflow cancelled its own task"):
            await controller.next_batch(0)
        assert set(failures(controller, ledger)) == {"the workflow cancelled its own task"}
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 60))


def test_a_batch_says_how_long_nothing_was_under_way(tmp_path: Path, build: Build) -> None:
    async def run() -> None:
        controller, _ = build(tmp_path, FakeWorkflow())
        controller.start()
        _, metrics = await controller.next_batch(0)
        assert "time/generation_idle_s" in metrics
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 60))
