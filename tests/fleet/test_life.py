"""The life of servers in a fleet, against servers that are objects of this process and fail when they are told to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal_core import background
from areal_core.disk import read_lines
from areal_core.engines import TensorDescription, WeightUpdate
from areal_core.errors import RunError
from areal_core.inference import server as server_module
from areal_core.inference.adapter import ServerIdentity
from areal_core.inference.errors import RequestRefusedError
from areal_core.inference.fleet import ServerFleet
from areal_core.messages.servers import ServerJoins, ServerLeaves
from areal_core.servers import ServerLostError
from areal_testing.virtual_time import run_virtually

TOKENS = 16
TENSORS = (TensorDescription("weight", "float32", (2, 2)),)


def test_a_faulty_server_does_not_fail_requests(running):
    """One of two answers every request with an error; it is taken out, and comes back only to be taken out again."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].fault = ServerLostError("500")
            found = await asyncio.gather(
                *(fleet.generate(running.request(f"r{n}", affinity=str(n % 3))) for n in range(30))
            )
            assert [len(one.output_ids) for one in found] == [TOKENS] * 30

    run_virtually(check())


def test_two_faulty_servers_do_not_fail_requests(running):
    """Two of three always fail; whoever meets them again and again must still reach the third."""

    async def check():
        servers = {name: running.server(slots=32) for name in "abc"}
        async with running(servers) as fleet:
            servers["a"].fault = servers["b"].fault = ServerLostError("500")
            found = await asyncio.gather(*(fleet.generate(running.request(f"r{n}")) for n in range(20)))
            assert [len(one.output_ids) for one in found] == [TOKENS] * 20

    run_virtually(check())


def test_a_server_with_faults_now_and_then_does_not_fail_a_request(running):
    """Others' success there keeps it in use; the request that fails on it must be given to another server."""

    async def check():
        servers = {"a": running.server(slots=32), "b": running.server(slots=32)}
        async with running(servers) as fleet:
            adapter = fleet.adapter
            plain = adapter.generate

            async def faulty(connection, partial):
                if connection.address == "http://a" and partial.name.startswith("unlucky"):
                    raise ServerLostError("500")
                async for chunk in plain(connection, partial):
                    yield chunk

            adapter.generate = faulty
            is_over = False

            async def keep_busy():
                number = 0
                while not is_over:
                    number += 1
                    await fleet.generate(running.request(f"lucky{number}", most=1))

            workers = [asyncio.create_task(keep_busy()) for _ in range(4)]
            for number in range(10):
                found = await fleet.generate(running.request(f"unlucky{number}"))
                assert len(found.output_ids) == TOKENS
            is_over = True
            await asyncio.gather(*workers)

    run_virtually(check())


def test_a_request_that_every_server_fails_under_ends_with_the_reason(running):
    async def check():
        servers = {name: running.server() for name in "abcd"}
        async with running(servers) as fleet:
            for server in servers.values():
                server.fault = ServerLostError("it burns")
            with pytest.raises(ValueError, match=r"servers failed under this request; the last one: it burns"):
                await fleet.generate(running.request())

    run_virtually(check())


def test_a_request_tells_when_it_has_a_place_on_a_server_and_not_before(running):
    async def check():
        server = running.server(slots=1)
        async with running({"a": server}) as fleet:
            first, behind = [], []
            server.is_open.clear()
            asked = [
                asyncio.create_task(fleet.generate(replace(running.request(f"r{n}"), on_slot_change=places.append)))
                for n, places in enumerate((first, behind))
            ]
            await running.until(lambda: first == [False, True], "a place for the first")
            await asyncio.sleep(0.05)
            assert behind == [False]
            server.is_open.set()
            await asyncio.gather(*asked)
            assert first == behind == [False, True]

    run_virtually(check())


def test_a_request_under_which_a_server_is_lost_waits_again_and_says_so(running):
    async def check():
        server = running.server()
        async with running({"a": server}) as fleet:
            places = []
            server.fault = ServerLostError("500")
            server.is_healthy = False
            asked = asyncio.create_task(fleet.generate(replace(running.request(), on_slot_change=places.append)))
            await running.until(lambda: running.states(fleet) == {"a": "lost"}, "a lost server")
            await asyncio.sleep(0.05)
            assert places[-1:] != [True]
            server.is_healthy, server.fault = True, None
            await asked
            assert places == [False, True] * (len(places) // 2)

    run_virtually(check())


def test_a_refusal_is_an_error_at_once(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            for server in servers.values():
                server.fault = RequestRefusedError("/generate was refused (400): no")
                server.partials.clear()
            with pytest.raises(ValueError, match="no"):
                await fleet.generate(running.request())
            assert sum(len(server.partials) for server in servers.values()) == 1

    run_virtually(check())


def test_an_answer_of_a_form_that_is_not_known_counts_as_a_fault_of_the_server(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].fault = KeyError("meta_info")
            for number in range(6):
                found = await fleet.generate(running.request(f"r{number}"))
                assert len(found.output_ids) == TOKENS
            servers["b"].update_fault = AttributeError("'list' object has no attribute 'get'")
            servers["a"].fault = None
            await running.until(lambda: running.states(fleet) == {"a": "ready", "b": "ready"}, "both ready")
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            assert running.states(fleet)["b"] != "ready"
            servers["b"].update_fault = None
            await running.until(
                lambda: running.states(fleet) == {"a": "ready", "b": "ready"}, "both ready after the update"
            )

    run_virtually(check())


def test_a_refused_server_does_not_limit_requests(running):
    async def check():
        small = running.server(context=8)
        async with running({"a": running.server(), "b": small}, servers=0) as fleet:
            small.identity = ServerIdentity("1", "", 8, 4, "float16")  # of another dtype: refused
            await running.until(lambda: running.states(fleet)["a"] == "ready", "a is ready")
            fleet.pool.lose(fleet.pool.servers["b"], "for this test")
            await running.until(lambda: running.states(fleet)["b"] == "refused", "b is refused")
            assert len((await fleet.generate(running.request())).output_ids) == TOKENS

    run_virtually(check())


def test_a_server_joins_and_leaves(running):
    async def check():
        late = running.server()
        async with running({"a": running.server(), "late": late}, addresses=["http://a"], servers=0) as fleet:
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            joins, leaves = ServerJoins("late", "http://late"), ServerLeaves("late", "http://late")
            assert (await fleet.answer(leaves)).state == "", "nothing happens to a server that is not there"
            assert (await fleet.answer(joins)).state == "starting"
            await running.until(lambda: running.states(fleet)["late"] == "ready", "it joined")
            assert late.version == "1"
            assert (await fleet.answer(joins)).state == "ready", "asking again changes nothing"
            going = [asyncio.create_task(fleet.generate(running.request(f"r{n}", most=50))) for n in range(6)]
            await running.until(lambda: fleet.pool.servers["late"].requests, "it is given requests")
            assert (await fleet.answer(leaves)).state == "leaving"
            for found in await asyncio.gather(*going):
                assert len(found.output_ids) == 50
            await running.until(lambda: running.states(fleet) == {"a": "ready"}, "it is gone")
            assert (await fleet.answer(leaves)).state == ""
            assert fleet.describe() == "1 ready; 0 requests"
            assert "late" not in fleet.lifecycle._tasks, "nothing is kept of a server that is gone"
            await fleet.answer(joins)
            await running.until(lambda: running.states(fleet)["late"] == "ready", "it came back under its name")

    run_virtually(check())


def test_a_server_that_leaves_while_it_starts_is_gone(running, tmp_path):
    async def check():
        late = running.server()
        late.is_healthy = False
        async with running({"a": running.server(), "late": late}, addresses=["http://a"], servers=0) as fleet:
            await fleet.answer(ServerJoins("late", "http://late"))
            await running.until(lambda: running.states(fleet).get("late") == "starting", "it was seen")
            assert (await fleet.answer(ServerLeaves("late", "http://late"))).state == ""
            late.is_healthy = True
            await asyncio.sleep(0.2)
            seen = read_lines(tmp_path / "logs" / "servers.jsonl")
            told = [entry["state"] for entry in seen if entry["server"] == "late"]
            assert told == ["gone"]

    run_virtually(check())


def test_a_name_or_an_address_that_is_taken_is_refused_in_words(running):
    async def check():
        async with running({"a": running.server(), "b": running.server()}, addresses=["http://a"], servers=0) as fleet:
            await fleet.answer(ServerJoins("b", "http://b"))
            for name, address in (("b", "http://c"), ("c", "http://b"), ("c", "http://a"), ("a", "http://c")):
                with pytest.raises(RunError, match=r"the run has a server . at http://. already"):
                    await fleet.answer(ServerJoins(name, address))
            assert (await fleet.answer(ServerLeaves("b", "http://other"))).state == running.states(fleet)["b"], (
                "it stays"
            )
            with pytest.raises(RunError, match="cannot answer a str"):
                await fleet.answer("what?")

    run_virtually(check())


def test_the_run_says_why_it_does_not_use_a_server(running):
    async def check():
        bad = running.server()
        bad.first_fault = ServerLostError("no kernel image")
        async with running({"a": running.server(), "bad": bad}, addresses=["http://a"], servers=0) as fleet:
            await fleet.answer(ServerJoins("bad", "http://bad"))
            await running.until(lambda: running.states(fleet)["bad"] == "refused", "it is refused")
            standing = await fleet.answer(ServerJoins("bad", "http://bad"))
            assert standing.state == "refused"
            assert "no kernel image" in standing.reason

    run_virtually(check())


def test_a_server_that_fails_during_its_first_request_and_recovers_is_used(running):
    """It was shot down just then: that says nothing about what it can serve."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            shot = servers["b"]

            class Shot(ServerLostError):
                def __init__(self):
                    super().__init__("broke off")

            shot.first_fault = Shot()
            plain = fleet.adapter.generate

            async def dies(connection, partial):
                if connection.address == "http://b" and partial.name.startswith("first-") and shot.first_fault:
                    shot.is_healthy = False
                async for chunk in plain(connection, partial):
                    yield chunk

            fleet.adapter.generate = dies
            fleet.pool.lose(fleet.pool.servers["b"], "for this test")
            await running.until(lambda: not shot.is_healthy, "it died in its first request")
            await asyncio.sleep(0.1)
            shot.first_fault, shot.is_healthy = None, True
            await running.until(lambda: running.states(fleet)["b"] == "ready", "it is used again")

    run_virtually(check())


def test_a_server_that_is_healthy_and_cannot_serve_is_refused(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        servers["b"].first_fault = ServerLostError("no kernel image")
        async with running(servers, servers=0) as fleet:
            await running.until(lambda: running.states(fleet)["b"] == "refused", "it is refused")
            assert "is healthy but cannot serve this model: no kernel image" in fleet.pool.explain()
            assert len((await fleet.generate(running.request())).output_ids) == TOKENS

    run_virtually(check())


def test_a_404_while_it_loads_refuses_no_server(running):
    """As a gateway answers for a server that is not there yet."""

    async def check():
        loading = running.server()
        async with running({"a": running.server(), "late": loading}, addresses=["http://a"], servers=0) as fleet:
            loading.health_fault = RequestRefusedError("/health was refused (404): no such page")
            await fleet.answer(ServerJoins("late", "http://late"))
            await asyncio.sleep(0.1)
            standing = await fleet.answer(ServerJoins("late", "http://late"))
            assert standing.state == "starting"
            assert "404" in standing.reason
            loading.health_fault = None
            await running.until(lambda: running.states(fleet)["late"] == "ready", "it is used")

    run_virtually(check())


def test_a_server_that_was_refused_is_looked_at_again_and_catches_up(running):
    """Somebody has put another one in its place, at the same address."""

    async def check():
        other = running.server()
        other.first_fault = ServerLostError("no space left on device")
        async with running({"a": running.server(), "other": other}, servers=0) as fleet:
            await running.until(lambda: running.states(fleet)["other"] == "refused", "it is refused")
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            other.first_fault, other.version, other.label = None, "0", "0"
            await running.until(lambda: running.states(fleet)["other"] == "ready", "it is used")
            assert other.version == "1"

    run_virtually(check())


def test_a_joined_server_whose_program_is_gone_leaves_the_pool(running, monkeypatch):
    """Killed with SIGKILL, it never said that it leaves."""

    async def check():
        late = running.server()
        async with running({"a": running.server(), "late": late}, addresses=["http://a"], servers=0) as fleet:
            monkeypatch.setattr(server_module, "JOIN_TIMEOUT_S", 0.2)
            await fleet.answer(ServerJoins("late", "http://late"))
            await running.until(lambda: running.states(fleet)["late"] == "ready", "it joined")
            await asyncio.sleep(0.4)
            assert running.states(fleet)["late"] == "ready", "it serves, whatever became of its program"
            late.is_healthy = False
            await running.until(lambda: running.states(fleet) == {"a": "ready"}, "nobody waits for it")
            assert "no longer sends pings" in running.log()
            assert "late" not in fleet.pool.reasons | fleet.lifecycle._tasks
            late.is_healthy = True
            await fleet.answer(ServerJoins("late", "http://late"))
            await running.until(lambda: running.states(fleet)["late"] == "ready", "it may come back under its name")

    run_virtually(check())


def test_an_error_in_an_adapter_ends_the_process_with_its_cause(running, monkeypatch):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        failed = []
        monkeypatch.setattr(background, "_handler", lambda name, error: failed.append((name, repr(error))))
        async with running(servers) as fleet:

            async def broken(connection):
                raise ZeroDivisionError("an adapter's own")

            fleet.adapter.identify = broken
            fleet.pool.lose(fleet.pool.servers["b"], "for this test")
            await running.until(lambda: failed, "it is told")
            assert failed[0] == ("the lifecycle of b", 'ZeroDivisionError("an adapter\'s own")')

    run_virtually(check())


@pytest.fixture
def closed_connections(running, monkeypatch):
    """Addresses whose connection was closed."""
    addresses = []
    fake_connection = type(running.adapter.connect("http://any"))
    monkeypatch.setattr(fake_connection, "close", lambda self: addresses.append(self.address))
    return addresses


def test_a_closed_fleet_asks_nothing_further_of_its_servers(running, closed_connections):
    async def check():
        async with running({"a": running.server(), "b": running.server()}):
            assert not closed_connections
        assert sorted(closed_connections) == ["http://a", "http://b"]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


def test_a_fleet_that_never_started_can_be_closed(running, tmp_path):
    async def check():
        await ServerFleet(running.adapter, tmp_path).close()

    asyncio.run(check())


def test_a_fleet_of_another_class_may_override_any_method(running, tmp_path):
    """What one of its parts does alone was an attribute of the instance, which hid an override."""

    class Quiet(ServerFleet):
        def describe(self) -> str:
            return f"quiet, {super().describe()}"

    assert Quiet(running.adapter, tmp_path).describe().startswith("quiet, ")
    assert not {name for name in vars(ServerFleet) if not name.startswith("_")} & set(
        vars(ServerFleet(running.adapter, tmp_path))
    )
