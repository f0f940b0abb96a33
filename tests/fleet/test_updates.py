"""New weights in a fleet whose servers fail, against servers that are objects of this process."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import msgspec
import pytest

from areal_core.data.packing import from_bytes, unpack
from areal_core.engines import TensorDescription, WeightUpdate
from areal_core.errors import RunError
from areal_core.inference.errors import UpdateRefusedError
from areal_core.rollout.logprob_check import check_answers
from areal_core.servers import SamplingParameters, ServerLostError, SlotLease, SlotRequest
from areal_testing.virtual_time import run_virtually

TOKENS = 16
TENSORS = (TensorDescription("weight", "float32", (2, 2)),)


def test_who_missed_a_broadcast_catches_up_from_a_folder_behind_the_next_one(running, tmp_path):
    """The trainer asks right after each broadcast, as the run does."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["b"].update_fault = UpdateRefusedError("broke off")
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            servers["b"].update_fault = None
            assert running.states(fleet) == {"a": "ready", "b": "lost"}
            version, offered = 1, False
            for version in range(2, 5):
                await asyncio.sleep(0.2)  # it is up again and waits
                assert await fleet.form_group("127.0.0.1", 1, "gloo", "") is not None
                await fleet.update_weights(WeightUpdate(version, None, TENSORS))
                if fleet.needs_folder():
                    offered = True
                    fleet.offer_folder(WeightUpdate(version, running.write_weights(tmp_path / f"v{version}")))
                    break
            assert offered, "the trainer was never asked for a folder"
            await running.until(lambda: running.states(fleet)["b"] == "ready", "it caught up")
            assert servers["b"].version == str(version)
            assert not fleet.needs_folder()

    run_virtually(check())


def test_the_only_server_lost_behind_a_broadcast_is_back_with_the_folder_that_it_asks_for(running, tmp_path):
    """No further sync comes, as the trainer waits for a batch that nobody generates."""

    async def check():
        servers = {"a": running.server()}
        async with running(servers) as fleet:
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            assert not fleet.needs_folder()
            fleet.pool.lose(fleet.pool.servers["a"], "killed")
            await running.until(fleet.needs_folder, "it asks for a folder")
            fleet.offer_folder(WeightUpdate(1, running.write_weights(tmp_path / "v1")))
            async with asyncio.timeout(60):
                found = await fleet.generate(running.request())
            assert set(found.versions) == {1}

    run_virtually(check())


@pytest.mark.parametrize("error", [ValueError("not base64"), OSError("no route"), msgspec.ValidationError("a list")])
def test_an_answer_that_cannot_be_read_costs_its_server_alone(running, error):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["b"].update_fault = error
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            assert running.states(fleet) == {"a": "ready", "b": "lost"}
            servers["b"].update_fault = None
            await running.until(lambda: running.states(fleet)["b"] == "ready", "it is back")

    run_virtually(check())


def test_a_broadcast_that_fails_everywhere_leaves_no_server_behind(running):
    """A ready server that was not in the group holds the former version, and goes on with it."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["a"].update_fault = UpdateRefusedError("broke off")
            servers["b"].cannot_join = True
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            with pytest.raises(RunError, match="no server took over"):
                await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            assert "updating" not in running.states(fleet).values()
            async with asyncio.timeout(60):
                found = await fleet.generate(running.request())
            assert set(found.versions) == {0}

    run_virtually(check())


def test_a_join_that_hangs_ends_and_says_whose_it_was(running, tmp_path):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers, group_timeout_s=0.3) as fleet:
            servers["b"].joins_never = True
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            async with asyncio.timeout(60):
                await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            assert running.states(fleet)["a"] == "ready"
            assert (
                "did not join the group of the broadcast: gave no answer within group_timeout_s = 0.3" in running.log()
            )

    run_virtually(check())


def test_a_broadcast_to_nobody_is_a_failure(running):
    """Else the trainer would send to nobody, for as long as its own time-out."""

    async def check():
        server = running.server()
        server.cannot_join = True
        async with running({"a": server}) as fleet:
            await fleet.form_group("127.0.0.1", 1, "gloo", "")
            with pytest.raises(RunError, match="did not join the group of the broadcast: cannot join"):
                await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            assert server.version == "1"

    run_virtually(check())


def test_a_loss_during_an_update_leaves_the_others_with_the_new_version(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            servers["b"].update_fault = ServerLostError("killed")
            going = [asyncio.create_task(fleet.generate(running.request(f"r{n}", most=200))) for n in range(6)]
            await asyncio.sleep(0.05)
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            assert running.states(fleet) == {"a": "ready", "b": "lost"}
            servers["b"].update_fault = None
            for found in await asyncio.gather(*going):
                assert found.output_ids == found.versions == sorted(found.versions)
                assert len(found.versions) == 200
            await running.until(lambda: running.states(fleet)["b"] == "ready", "it caught up")
            assert servers["b"].version == "1"

    run_virtually(check())


def test_with_no_server_left_requests_end_with_the_reasons(running):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            fleet.lifecycle._settings = fleet.adapter.settings.model_copy(update={"start_timeout_s": 0.6})
            for server in servers.values():
                server.is_healthy = False
            await running.until(lambda: set(running.states(fleet).values()) <= {"lost", "starting"}, "both are lost")
            with pytest.raises(RunError, match=r"0 of 2 servers are ready, too few for \S+ s;") as caught:
                await asyncio.wait_for(fleet.generate(running.request()), 60)
            for name in "ab":
                assert re.search(rf"{name} (lost|starting): /health: ClientConnectorError", str(caught.value))

    run_virtually(check())


def test_the_only_server_is_lost_during_an_update(running):
    """Its death says nothing about the weights: it catches up with them when it is back."""

    async def check():
        servers = {"a": running.server()}
        async with running(servers) as fleet:
            servers["a"].update_fault = ServerLostError("killed")
            going = asyncio.create_task(fleet.generate(running.request(most=50)))
            await asyncio.sleep(0.02)
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            servers["a"].update_fault = None
            found = await going
            assert found.versions == sorted(found.versions)
            assert found.versions[-1] == 1
            assert len(found.versions) == 50

    run_virtually(check())


def test_closing_ends_although_something_happened_just_before(running):
    """A cancellation that comes together with an event must not be swallowed."""

    async def check():
        async with running({"a": running.server()}) as fleet:
            fleet.pool.servers["a"].doubted.set()
            async with asyncio.timeout(60):
                await fleet.close()

    run_virtually(check())


def test_servers_that_gave_their_memory_away_take_the_next_weights(running, tmp_path):
    """They are none of the lost ones: they get their memory back, then the weights, and then requests."""

    async def check():
        server = running.server()
        async with running({"a": server}) as fleet:
            for version in (1, 2):
                await fleet.sleep()
                assert not server.has_memory
                waiting = asyncio.create_task(fleet.generate(running.request()))
                await asyncio.sleep(0.1)
                assert not waiting.done()
                await fleet.update_weights(
                    WeightUpdate(version, running.write_weights(tmp_path / f"version-{version}"))
                )
                assert server.has_memory
                assert set((await waiting).versions) == {version}
            assert '"lost"' not in (tmp_path / "logs" / "servers.jsonl").read_text()

    run_virtually(check())


@pytest.mark.parametrize("fault", [ServerLostError("/flush_cache failed"), OSError("reset"), ValueError("no JSON")])
def test_a_server_that_keeps_its_memory_is_lost_and_nobody_waits_for_it(running, tmp_path, fault):
    async def check():
        servers = {"a": running.server(), "b": running.server()}
        servers["a"].release_fault = fault
        async with running(servers) as fleet:
            await fleet.sleep()
            assert "did not free its GPU memory" in (tmp_path / "logs" / "servers.jsonl").read_text()
            await fleet.update_weights(WeightUpdate(1, running.write_weights(tmp_path / "version-1")))
            await running.until(
                lambda: running.states(fleet) == {"a": "ready", "b": "ready"}, "both hold the new weights"
            )
            assert [server.version for server in servers.values()] == ["1", "1"]

    run_virtually(check())


def test_all_servers_are_lost_when_weights_are_verified(running):
    """The trainer syncs and asks for answers that verify the weights, and nobody is there: they are waited for."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            for server in servers.values():
                server.is_healthy = False
            await running.until(lambda: "ready" not in running.states(fleet).values(), "both are lost")
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            asked = asyncio.create_task(check_answers(fleet, SamplingParameters(), 1))
            await asyncio.sleep(0.1)
            assert not asked.done(), asked
            for server in servers.values():
                server.is_healthy = True
            async with asyncio.timeout(60):
                assert len(unpack(from_bytes(await asked))) >= 4

    run_virtually(check())


def test_a_server_that_loads_longer_than_the_trainer_trains_joins(running, tmp_path):
    """From folders: weights are synced again and again while it loads, each before it has loaded the last."""

    async def check():
        servers = {"a": running.server(), "late": running.server()}
        async with running(servers) as fleet:
            slow = servers["late"]
            slow.loading_s = 0.2
            fleet.pool.lose(fleet.pool.servers["late"], "for this test")
            for version in range(1, 60):
                await fleet.update_weights(WeightUpdate(version, fleet.first_weights))
                if running.states(fleet)["late"] == "ready" and version > 1:
                    break
                await asyncio.sleep(0.02)
            assert running.states(fleet)["late"] == "ready", f"it did not join in {version} weight syncs"
            assert slow.version == servers["a"].version == str(version)

    run_virtually(check())


def test_a_server_that_loads_longer_than_the_trainer_trains_joins_broadcasts(running, tmp_path):
    """A folder is offered now and then, and outdated before it is loaded; the group must wait for the server."""

    async def check():
        servers = {"a": running.server(), "late": running.server()}
        async with running(servers) as fleet:
            servers["late"].loading_s = 0.2
            fleet.pool.lose(fleet.pool.servers["late"], "for this test")
            group, version = None, 0
            for version in range(1, 60):
                group = await fleet.form_group("127.0.0.1", 1, "gloo", group.name if group else "")
                await fleet.update_weights(WeightUpdate(version, None, TENSORS))
                if fleet.needs_folder():
                    fleet.offer_folder(WeightUpdate(version, fleet.first_weights))
                if group.world_size == 3:
                    break
                await asyncio.sleep(0.02)
            assert group.world_size == 3, f"it was in no group after {version} weight syncs"
            assert running.states(fleet) == {"a": "ready", "late": "ready"}
            assert servers["late"].version == servers["a"].version == str(version)

    run_virtually(check())


def test_the_group_of_a_lost_server_is_not_used_again(running):
    """A broadcast over NCCL would wait for it until weight_sync.timeout_s."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        async with running(servers) as fleet:
            whole = await fleet.form_group("127.0.0.1", 1, "gloo", "")
            await fleet.update_weights(WeightUpdate(1, None, TENSORS))
            same = await fleet.form_group("127.0.0.1", 1, "gloo", whole.name)
            await fleet.update_weights(WeightUpdate(2, None, TENSORS))
            assert (same.name, same.is_new) == (whole.name, False)
            fleet.pool.lose(fleet.pool.servers["b"], "for this test")
            rest = await fleet.form_group("127.0.0.1", 1, "gloo", whole.name)
            await fleet.update_weights(WeightUpdate(3, None, TENSORS))
            assert (rest.is_new, rest.world_size) == (True, 2)
            assert servers["a"].version == "3"

    run_virtually(check())


def test_a_server_that_comes_back_is_given_weights_when_no_slot_of_it_is_out(running):
    """It labels no tokens: whoever holds one would call them by the version of its grant."""

    async def check():
        servers = {"a": running.server(), "b": running.server()}
        servers["a"].identity = replace(servers["a"].identity, reports_spans=False)
        async with running(servers) as fleet:
            member, holder = fleet.pool.servers["a"], SlotLease(fleet, SlotRequest(avoided=("b",)))
            assert (await holder.__aenter__()).server == "a"
            holder.lose = lambda: None  # its worker is busy and has not heard of it
            fleet.pool.lose(member, "for this test")
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            await running.until(lambda: running.states(fleet)["a"] == "syncing", "it comes back")
            await asyncio.sleep(0.1)
            assert servers["a"].version == "0"
            await holder.__aexit__(None, None, None)
            await running.until(lambda: len(fleet.pool.ready) == 2, "it is ready")
            assert servers["a"].version == "1"

    run_virtually(check())


@pytest.mark.parametrize("patience_s", [60.0, 0.1])
def test_what_cannot_go_on_elsewhere_is_waited_for_before_an_update(running, patience_s):
    """A request with a stop text begins anew where it is ended; with an update every few seconds it would never end."""

    async def check():
        server = running.server()
        server.identity = replace(server.identity, reports_spans=False)
        async with running({"a": server}, drain_timeout_s=patience_s) as fleet:
            holder, before = SlotLease(fleet, SlotRequest(is_resumable=False)), server.aborts
            await holder.__aenter__()
            update = asyncio.ensure_future(fleet.update_weights(WeightUpdate(1, fleet.first_weights)))
            if patience_s < 1:
                await running.until(lambda: server.aborts > before, "it is ended after a while")
            else:
                await asyncio.sleep(0.3)
                assert server.aborts == before
            assert not update.done()
            await holder.__aexit__(None, None, None)
            await asyncio.wait_for(update, 60)
            assert server.version == "1"

    run_virtually(check())
