"""Slots of servers: how workers get, hold and lose them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_testing.fakes import FakeEngine, FakeWorkflow
from tests.rollout.worker_parts import GRANT, HANG_S, SlotQueue, group, read, run, running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_time_in_which_a_request_waits_for_its_slot_is_not_the_episodes() -> None:
    async def check() -> None:
        slots = SlotQueue()
        async with running(FakeWorkflow(), slots=slots) as (workers, _, _):
            asked = asyncio.ensure_future(workers.run(group(timeout_s=0.25)))
            while workers.waiting < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            slots.open(GRANT, 2)
            batch, _ = read(await asked)
            assert batch is not None, "its clock stood still"
            assert workers.waiting == 0

    run(check())


def test_slots_of_a_worker_that_is_lost_are_given_to_others() -> None:
    class Slow(FakeEngine):
        async def generate(self, request: Any) -> Any:
            begun.append(request)
            await go_on.wait()
            return await super().generate(request)

    begun, go_on = list[Any](), asyncio.Event()

    async def check() -> None:
        slots = SlotQueue()
        slots.open(GRANT, 3)
        async with running(FakeWorkflow(), Slow(), slots=slots) as (workers, processes, _):
            asked = [asyncio.ensure_future(workers.run(group(number))) for number in (1, 2)]
            while len(begun) < 3:
                await asyncio.sleep(0.01)
            go_on.set()
            await processes.started[0].die()
            for ended in asked:
                batch, _ = read(await ended)
                assert batch is not None

    run(check())


def test_what_was_asked_of_a_lost_server_is_asked_again() -> None:
    class Hanging(FakeEngine):
        async def generate(self, request: Any) -> Any:
            begun.append(request)
            if len(begun) <= 3:
                await asyncio.sleep(HANG_S)
            return await super().generate(request)

    begun = list[Any]()

    async def check() -> None:
        slots = SlotQueue()
        slots.open(GRANT, 3)
        async with running(FakeWorkflow(), Hanging(), slots=slots) as (workers, _, _):
            asked = asyncio.ensure_future(workers.run(group()))
            while len(begun) < 3:
                await asyncio.sleep(0.01)
            for holder in slots._held:
                holder.lose()
            batch, _ = read(await asked)
            assert batch is not None
            assert len(begun) == 6

    run(check())


def test_where_there_will_never_be_a_slot_the_run_ends() -> None:
    async def check() -> None:
        slots = SlotQueue()
        async with running(FakeWorkflow(), slots=slots) as (workers, _, _):
            asked = asyncio.ensure_future(workers.run(group()))
            while workers.waiting < 3:
                await asyncio.sleep(0.01)
            slots.fail(RunError("the engine is gone", hints=["start another one"]))
            with pytest.raises(RunError, match="the engine is gone") as caught:
                await asked
            assert caught.value.hints == ("start another one",)

    run(check())
