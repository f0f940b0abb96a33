"""Servers that the run's driver starts: synced when they come again, ended when they do not do what they should."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.inference.server import State
from areal_core.messages.servers import ServerLeaves
from areal_core.runtime.messages import RestartMember
from areal_core.servers import ServerLostError
from areal_testing.virtual_time import run_virtually
from tests.fleet.conftest import TENSORS


def restarts(driver):
    return [message for message in driver.told if isinstance(message, RestartMember)]


@asynccontextmanager
async def two_that_serve(running, own):
    """A fleet, and the driver that has started both of its servers and has a third."""
    starting, driver = own(*(running.server() for _ in range(3)), starts=2, servers=2)
    async with starting as fleet:
        await running.until(lambda: len(fleet.pool.ready) == 2, "both serve")
        yield fleet, driver


def test_a_server_that_dies_is_synced_when_it_comes_again_and_used(running, own):
    async def check():
        starting, driver = own(running.server(), running.server())
        async with starting as fleet:
            assert len((await fleet.generate(running.request())).output_ids) == 16
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            driver.end("server-0", is_again=False)
            await running.until(lambda: running.states(fleet) == {"server-0": "lost"}, "the loss is told")
            going = asyncio.create_task(fleet.generate(running.request()))
            driver.start("server-0")
            assert set((await going).versions) == {1}
            assert driver.servers["server-0"].version == "1"
            assert restarts(driver) == []

    run_virtually(check())


def test_a_request_that_is_under_way_when_its_server_dies_goes_on_elsewhere(running, own):
    async def check():
        async with two_that_serve(running, own) as (fleet, driver):
            going = [asyncio.create_task(fleet.generate(running.request(f"r{n}", most=60))) for n in range(6)]
            await running.until(lambda: all(one.requests for one in fleet.pool.ready), "both work")
            await asyncio.sleep(0.02)
            driver.end("server-1")
            assert [len(found.output_ids) for found in await asyncio.gather(*going)] == [60] * 6

    run_virtually(check())


def test_a_server_of_an_attempt_before_is_given_the_weights_whatever_it_holds(running, own):
    """It may be in the middle of anything, and the number of its weights means nothing any more."""

    async def check():
        server = running.server()
        server.label, server.version = "another-7", "7"
        server.is_open.clear()
        starting, driver = own(server, starts=0)
        entering = asyncio.create_task(starting.__aenter__())
        await running.until(lambda: hasattr(driver, "changed"), "it is watched")
        driver.start("server-0", is_fresh=False)
        fleet = await entering
        assert server.label == fleet.pool.servers["server-0"].label(0)
        assert set((await fleet.generate(running.request())).versions) == {0}
        await starting.__aexit__(None, None, None)

    run_virtually(check())


def test_a_server_that_is_silent_for_too_long_is_ended_and_started_again(running, own):
    async def check():
        starting, driver = own(running.server(), running.server())
        async with starting as fleet:
            former = driver.servers["server-0"]
            former.is_healthy = False
            await running.until(lambda: restarts(driver), "the driver is asked")
            assert restarts(driver)[0].name == "server-0"
            assert "was not healthy within 0.2 s" in restarts(driver)[0].why
            assert set((await fleet.generate(running.request())).versions) == {0}
            assert driver.servers["server-0"] is not former

    run_virtually(check())


def test_a_server_that_fails_its_first_request_after_it_came_again_is_started_once_more(running, own):
    async def check():
        second = running.server()
        second.first_fault = ServerLostError("CUDA out of memory")
        starting, driver = own(running.server(), second, running.server())
        async with starting as fleet:
            driver.end("server-0")
            await running.until(lambda: driver.fates == [] and fleet.pool.ready, "the third one serves")
            (asked,) = restarts(driver)
            assert asked.why == "failed its first request: CUDA out of memory"

    run_virtually(check())


def test_a_server_that_the_driver_gives_up_ends_the_start_in_its_words(own):
    async def check():
        starting, _ = own("ended before it was ready: unrecognized arguments: --no-such-option")
        with pytest.raises(RunError, match="--no-such-option"):
            async with asyncio.timeout(60), starting:
                pass

    run_virtually(check())


def test_the_run_goes_on_without_one_that_the_driver_gives_up(running, own):
    async def check():
        starting, driver = own(running.server(), running.server(), "ended 4 times in 300 s", starts=2, servers=2)
        async with starting as fleet:
            await running.until(lambda: len(fleet.pool.ready) == 2, "both serve")
            driver.end("server-1")
            await running.until(lambda: running.states(fleet)["server-1"] == "refused", "it is given up")
            assert "ended 4 times in 300 s" in fleet.pool.explain()
            assert len((await fleet.generate(running.request())).output_ids) == 16
            assert fleet.pool.failure is None

    run_virtually(check())


def test_the_run_ends_at_once_where_the_driver_gives_up_the_only_server(running, own):
    """It has served, and nobody starts it again: there is nothing to wait for."""

    async def check():
        starting, driver = own(running.server(), "ended 4 times in 300 s", starts=1, servers=1)
        async with starting as fleet:
            driver.end("server-0")
            await running.until(lambda: fleet.pool.failure, "the end", 10)
            assert "ended 4 times in 300 s" in str(fleet.pool.failure)
            assert "RUN_DIR/logs/server-0.log" in fleet.pool.failure.hints[0]

    run_virtually(check())


def test_one_that_is_refused_after_it_served_is_waited_for_until_it_is_given_up(running, own):
    """Between one process and the next it has no address, and the driver starts it again."""

    async def check():
        starting, _ = own(running.server(), running.server(), starts=2, servers=1)
        async with starting as fleet:
            member = fleet.pool.servers["server-0"]
            fleet.pool.lose(member, "answers, but not as a server of this kind does", State.REFUSED)
            member.connection.address = ""
            assert fleet.pool.possible == 1
            member.is_given_up = True
            assert fleet.pool.possible == 0

    run_virtually(check())


def test_a_server_of_an_attempt_before_that_answers_nothing_is_ended_and_started_again(running, own):
    """Its GPU may wait for ever in a broadcast whose rank 0 was killed, while its front end answers."""

    async def check():
        stuck = running.server()
        stuck.is_stuck = True
        starting, driver = own(stuck, running.server(), starts=0)
        entering = asyncio.create_task(starting.__aenter__())
        await running.until(lambda: hasattr(driver, "changed"), "it is watched")
        driver.start("server-0", is_fresh=False)
        await running.until(lambda: restarts(driver), "the driver is asked")
        assert restarts(driver)[0].why == "gave no answer within 0.2 s"
        fleet = await entering
        assert driver.servers["server-0"] is not stuck
        assert set((await fleet.generate(running.request())).versions) == {0}
        await starting.__aexit__(None, None, None)

    run_virtually(check())


def test_one_that_keeps_its_memory_is_ended_before_the_trainer_goes_on(running, own):
    async def check():
        former = running.server()
        starting, driver = own(former, running.server())
        async with starting as fleet:
            former.release_fault = ServerLostError("/flush_cache failed")
            await fleet.sleep()
            assert restarts(driver) == [RestartMember("server-0", "did not free its GPU memory")]
            assert not former.is_healthy
            assert driver.waiting == ["server-0"], "in the trainer's turn nothing is started"
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            await running.until(lambda: fleet.pool.ready, "the next one serves")
            assert set((await fleet.generate(running.request())).versions) == {1}

    run_virtually(check())


def test_one_that_dies_in_the_trainers_turn_is_started_when_that_ends(running, own):
    """Its GPU is the trainer's until then. The others take the update at once."""

    async def check():
        async with two_that_serve(running, own) as (fleet, driver):
            await fleet.sleep()
            driver.end("server-1")
            await asyncio.sleep(0.1)
            assert [*driver.servers] == ["server-0"], "it is started into memory that the trainer has"
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            assert [member.name for member in fleet.pool.ready] == ["server-0"]
            await running.until(lambda: len(fleet.pool.ready) == 2, "both serve again")
            assert {server.version for server in driver.servers.values()} == {"1"}

    run_virtually(check())


def test_one_that_is_synced_when_the_trainers_turn_begins_is_waited_for(running, own):
    """And then gives its memory away like the others, whether or not it was given requests before."""

    async def check():
        async with two_that_serve(running, own) as (fleet, driver):
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            late = driver.fates[0]
            late.update_may_go_on.clear()
            driver.end("server-1")
            await running.until(lambda: not late.is_open.is_set(), "it is being given the weights")
            releasing = asyncio.create_task(fleet.sleep())
            await asyncio.sleep(0.1)
            assert not releasing.done(), "the trainer goes on while a server loads on its GPU"
            late.update_may_go_on.set()
            await releasing
            assert not late.has_memory
            await asyncio.sleep(0.1)
            assert late.version == "1"
            await fleet.update_weights(WeightUpdate(2, fleet.first_weights))
            await running.until(lambda: len(fleet.pool.ready) == 2, "both serve again")
            assert late.version == "2"

    run_virtually(check())


def test_one_that_waits_for_a_folder_gives_its_memory_away(running, own):
    async def check():
        async with two_that_serve(running, own) as (fleet, driver):
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            late = driver.fates[0]
            driver.end("server-1")
            await running.until(fleet.needs_folder, "it waits for a folder")
            await fleet.sleep()
            assert not late.has_memory
            await fleet.update_weights(WeightUpdate(2, fleet.first_weights))
            await running.until(lambda: len(fleet.pool.ready) == 2, "both serve again")
            assert late.version == "2"

    run_virtually(check())


def test_one_that_is_asked_when_the_trainers_turn_begins_answers_before_its_memory_goes(running, own):
    """Whether a server of an attempt before still answers is seen by a request, which needs its memory."""

    async def check():
        late = running.server()
        late.token_s = 0.05
        starting, driver = own(running.server(), late, servers=2)
        async with starting as fleet:
            driver.start("server-1", is_fresh=False)
            await running.until(lambda: any(name.startswith("revived") for name in late.partials), "it is asked")
            await fleet.sleep()
            assert not late.has_memory
            assert late.under_way == 0
            asked = len(late.partials)
            await asyncio.sleep(5)
            assert len(late.partials) == asked, "it is asked in the trainer's turn"
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            await running.until(lambda: len(fleet.pool.ready) == 2, "both serve")

    run_virtually(check())


def test_an_update_that_fails_with_its_process_costs_the_next_process_nothing(running, own):
    """The driver may replace a process before the controller hears that the update of the former one has failed."""

    async def check():
        starting, driver = own(running.server(), running.server())
        async with starting as fleet:
            former = driver.servers["server-0"]
            former.update_may_go_on.clear()
            updating = asyncio.create_task(fleet.update_weights(WeightUpdate(1, fleet.first_weights)))
            await running.until(lambda: not former.is_open.is_set(), "it is being updated")
            driver.end("server-0")
            await running.until(lambda: running.states(fleet)["server-0"] == "syncing", "the next process is there")
            former.update_fault = ServerLostError("closed the connection")
            former.update_may_go_on.set()
            await updating
            await running.until(lambda: fleet.pool.ready, "it serves")
            assert driver.servers["server-0"].version == "1"
            assert restarts(driver) == []
            assert running.log().count('"lost"') == 1, "the next process was lost with the former one's update"

    run_virtually(check())


def test_nobody_takes_out_a_server_that_the_run_started(running, own):
    """`areal serve` leaves with the server that it has started. The run's own belong to the driver."""

    async def check():
        starting, driver = own(running.server())
        async with starting as fleet:
            leaves = ServerLeaves("server-0", driver.serving["server-0"].address)
            assert (await fleet.answer(leaves)).state == "ready"
            assert set((await fleet.generate(running.request())).versions) == {0}

    run_virtually(check())
