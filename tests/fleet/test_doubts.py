"""What workers, other runs and silent servers say and do is not taken at its word."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.inference.errors import RequestRefusedError
from areal_core.servers import ServerLostError, SlotLease, SlotRequest
from areal_testing.virtual_time import run_virtually
from tests.fleet.conftest import TENSORS


def test_a_label_of_another_run_is_not_believed(running):
    """Two runs use one server: the other one's version 0 has the same number and is another model."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].label = servers["a"].label.replace(fleet.pool.run_id, "another-")
            for number in range(8):
                found = await fleet.generate(running.request(f"r{number}"))
                assert set(found.versions) == {0}
            await running.until(lambda: "another program may have changed them" in running.log(), "it was taken out")

    run_virtually(check())


def test_a_request_under_way_ends_with_the_fleet(running):
    """Its server may never say another word."""

    async def check():
        server = running.server()
        async with running({"a": server}) as fleet:
            server.is_stuck = True
            waiting = asyncio.ensure_future(fleet.generate(running.request()))
            await running.until(lambda: fleet.pool.ready[0].requests, "the request")
            await fleet.close()
            with pytest.raises(RunError, match="the servers were closed"):
                await asyncio.wait_for(waiting, 60)

    run_virtually(check())


def test_a_worker_that_fails_takes_no_server_out(running):
    """It may be out of file descriptors; the servers answer everybody else."""

    async def check():
        async with running({"a": running.server(), "b": running.server()}) as fleet:
            for _ in range(12):
                with pytest.raises(ServerLostError):
                    async with SlotLease(fleet, SlotRequest()):
                        raise ServerLostError("too many open files")
            await running.until(lambda: not any(m.doubted.is_set() for m in fleet.pool.servers.values()), "a look")
            assert running.states(fleet) == {"a": "ready", "b": "ready"}

    run_virtually(check())


def test_tokens_that_the_model_has_not_are_a_fault_of_the_server(running):
    """The workflow would be blamed for them, and the server be asked on."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].version = "1000000"  # which it gives as its token
            found = await asyncio.gather(*(fleet.generate(running.request(f"r{number}")) for number in range(8)))
            assert {token for answer in found for token in answer.output_ids} == {0}
            await running.until(lambda: running.states(fleet)["a"] in ("lost", "syncing"), "it is taken out")
            assert "gives 1000000 as a token of" in running.log()

    run_virtually(check())


def test_a_request_does_not_come_back_to_a_server_that_nobody_has_looked_at(running):
    """Four failures of a server that has just died, within a moment, would be called the request's own."""

    async def check():
        server = running.server()
        async with running({"a": server}, health_interval_s=60.0) as fleet:
            server.fault, server.is_healthy = ServerLostError("connection refused"), False
            asked = asyncio.ensure_future(fleet.generate(running.request()))
            await running.until(lambda: running.states(fleet)["a"] == "lost", "it is taken out")
            server.fault, server.is_healthy = None, True
            assert len((await asyncio.wait_for(asked, 60)).output_ids) == 16

    run_virtually(check())


def test_a_look_that_an_update_has_ended_says_nothing_about_the_server(running):
    """A server that does not label tokens ends its requests before an update, and the look at it is among them."""

    async def check():
        server = running.server()
        server.identity = replace(server.identity, reports_spans=False)
        async with running({"a": server}) as fleet:
            server.ends_at_abort, server.token_s = True, 1.0
            fleet.pool.servers["a"].doubted.set()
            await running.until(lambda: any(name.startswith("doubted") for name in server.partials), "the look")
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            server.token_s = 0.001
            assert running.states(fleet) == {"a": "ready"}
            await running.until(lambda: not fleet.pool.servers["a"].doubted.is_set(), "another look")
            assert len([name for name in server.partials if name.startswith("doubted")]) > 1
            assert "refused" not in running.log()
            assert (await fleet.generate(running.request())).versions == [1] * 16

    run_virtually(check())


def test_who_leaves_during_an_update_is_counted_on_until_it_is_over(running):
    """Others would wait in the broadcast for one that is not called any more."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            group = await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.lifecycle._groups.joined()
            fleet.lifecycle.leave("b", "http://b")
            assert running.states(fleet)["b"] == "ready"
            assert group.world_size == 3
            await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            assert {server.version for server in servers.values()} == {"1"}
            fleet.lifecycle.leave("b", "http://b")
            await running.until(lambda: running.states(fleet) == {"a": "ready"}, "b has left")

    run_virtually(check())


def test_an_address_at_which_nobody_answers_is_told(running):
    async def check():
        told = []
        async with running({"a": running.server()}) as fleet:
            fleet.pool.log = told.append
            fleet.lifecycle.join("b", "http://b")
            await running.until(lambda: told, "a line")
            assert told == ["b does not answer yet, waiting for it: /health: ClientConnectorError"]
            assert fleet.describe() == "1 ready, 1 starting; 0 requests; b starting: /health: ClientConnectorError"

    run_virtually(check())


def test_a_server_that_cannot_answer_is_not_taken_for_verified(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["b"].fault = RequestRefusedError("no such model")
            with pytest.raises(ValueError, match="no such model"):
                await fleet.generate_everywhere(running.request())

    run_virtually(check())


def test_a_token_that_is_no_number_costs_its_server_and_not_the_controller(running):
    async def check():
        server = running.server()
        async with running({"a": server}) as fleet:
            server.version = str(1 << 70)  # which it gives as its token
            fleet.pool.servers["a"].doubted.set()
            await running.until(lambda: "answered in an unknown form" in running.log(), "it is lost")

    run_virtually(check())
