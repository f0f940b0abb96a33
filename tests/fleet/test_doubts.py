"""What workers, other runs and silent servers say and do is not taken at its word."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.errors import RunError
from areal_core.interfaces import ServerLostError, Slot, Want
from tests.virtual_time import run_virtually


def test_a_label_of_another_run_is_not_believed(running):
    """Two runs use one server: the other one's version 0 has the same number and is another model."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].label = servers["a"].label.replace(fleet.roster.mark, "another-")
            for number in range(8):
                found = await fleet.generate(running.request(f"r{number}"))
                assert set(found.versions) == {0}
            await running.until(lambda: "somebody else may have changed them" in running.log(), "it was taken out")

    run_virtually(check())


def test_a_request_under_way_ends_with_the_fleet(running):
    """Its server may never say another word."""

    async def check():
        server = running.server()
        async with running({"a": server}) as fleet:
            server.is_stuck = True
            waiting = asyncio.ensure_future(fleet.generate(running.request()))
            await running.until(lambda: fleet.roster.ready[0].requests, "the request")
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
                    async with Slot(fleet, Want()):
                        raise ServerLostError("too many open files")
            await running.until(lambda: not any(m.doubted.is_set() for m in fleet.roster.members.values()), "a look")
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
            await running.until(lambda: running.states(fleet)["a"] == "refused", "it is taken out")
            assert "gives tokens that the model has not" in running.log()

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
