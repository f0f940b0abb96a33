"""Servers that come and go with their nodes: between a minimum and a maximum, wherever the driver finds room."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.errors import RunError
from areal_testing.virtual_time import run_virtually


def bounds(minimum, maximum):
    return {"minimum": minimum, "maximum": maximum}


def names(fleet, state):
    return sorted(name for name, member in fleet.pool.servers.items() if str(member.state) == state)


def test_the_run_begins_with_the_minimum_and_more_servers_join_when_there_is_room(running, own):
    async def check():
        starting, driver = own(*(running.server() for _ in range(4)), starts=2, servers=bounds(2, 4))
        async with starting as fleet:
            assert names(fleet, "ready") == ["server-0", "server-1"]
            assert names(fleet, "waiting for room") == ["server-2", "server-3"]
            driver.start("server-3")
            await running.until(lambda: len(names(fleet, "ready")) == 3, "a third one serves")
            driver.start("server-2")
            await running.until(lambda: len(names(fleet, "ready")) == 4, "all serve")

    run_virtually(check())


def test_where_its_node_goes_a_server_is_gone_and_its_requests_end_elsewhere_with_their_tokens(running, own):
    async def check():
        starting, driver = own(*(running.server() for _ in range(3)), starts=2, servers=bounds(1, 2))
        async with starting as fleet:
            await running.until(lambda: len(names(fleet, "ready")) == 2, "both serve")
            going = [asyncio.create_task(fleet.generate(running.request(f"r{n}", most=40))) for n in range(6)]
            await running.until(lambda: all(one.requests for one in fleet.pool.ready), "both work")
            await asyncio.sleep(0.02)
            driver.end("server-0", is_again=False)
            found = await asyncio.gather(*going)
            assert [len(one.output_ids) for one in found] == [40] * 6
            assert names(fleet, "waiting for room") == ["server-0"]
            assert fleet.pool.failure is None
            assert len((await fleet.generate(running.request(most=5))).output_ids) == 5
            driver.start("server-0")
            await running.until(lambda: len(names(fleet, "ready")) == 2, "it is back on another node")

    run_virtually(check())


def test_below_the_minimum_the_run_ends_after_a_while_with_what_to_do(running, own):
    async def check():
        starting, driver = own(running.server(), running.server(), starts=2, servers=bounds(2, 3))
        async with starting as fleet:
            fleet.lifecycle._settings = fleet.adapter.settings.model_copy(update={"start_timeout_s": 2.0})
            driver.end("server-0", is_again=False)
            await running.until(lambda: len(names(fleet, "ready")) == 1, "one is left")
            assert len((await fleet.generate(running.request(most=5))).output_ids) == 5, "it goes on with the rest"
            await running.until(lambda: fleet.pool.failure, "the deadline")
            with pytest.raises(RunError, match="1 of 2 servers are ready, too few for 2 s") as caught:
                await fleet.generate(running.request())
            assert "server-0 waiting for room: its process has ended" in str(caught.value)
            assert "give the run more nodes, lower servers.minimum" in caught.value.hints[0]

    run_virtually(check())


def test_too_little_room_at_the_start_ends_it_in_words(running, own):
    async def check():
        starting, _ = own(running.server(), servers=bounds(2, 3), start_timeout_s=0.5)
        with pytest.raises(RunError, match="1 of 2 servers are ready"):
            async with starting:
                pass

    run_virtually(check())


def test_a_config_that_no_server_can_be_started_with_ends_the_start_at_once(own):
    """Those that wait for room would fare no better."""

    async def check():
        starting, _ = own("ended before it was ready: unrecognized arguments: --no-such-option", servers=bounds(1, 4))
        with pytest.raises(RunError, match="--no-such-option"):
            async with asyncio.timeout(60), starting:
                pass

    run_virtually(check())
