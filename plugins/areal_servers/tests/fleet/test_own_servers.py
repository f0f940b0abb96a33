"""Servers that the run starts itself: started again when they end, told of when they cannot be."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.errors import RunError
from areal_core.interfaces import EndMeans, GenerationRequest, SamplingParameters, WeightUpdate
from areal_servers.errors import ServerLostError

pytestmark = pytest.mark.slow

HANG_S = 60
KILLED = "server-0.log: was killed by SIGKILL"


def request(most=16):
    return GenerationRequest("r", [1, 2], SamplingParameters(max_new_tokens=most), 0)


async def until(condition, what):
    try:
        async with asyncio.timeout(HANG_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited in vain for: {what}") from None


def test_a_server_that_dies_is_started_again_and_catches_up(running, own, capsys):
    async def check():
        starting, processes = own(running.server(), running.server())
        async with starting as fleet:
            assert len((await fleet.generate(request())).output_ids) == 16
            await fleet.update_weights(WeightUpdate(1, fleet.first_weights))
            member = fleet.roster.members["server-0"]
            processes.started[0].die(-9, "")
            await until(lambda: str(member.state) == "lost", "the loss is noticed, with nothing under way")
            assert set((await fleet.generate(request())).versions) == {1}
            assert processes.started[1].server.version == "1"
        assert processes.started[1].server.is_healthy is False, "it ended with the fleet"
        assert "killed by SIGKILL" in capsys.readouterr().err

    asyncio.run(check())


def test_the_end_of_a_process_is_told_also_where_its_port_was_found_closed_first(running, own, capsys):
    async def check():
        starting, processes = own(running.server(), running.server())
        async with starting as fleet:
            assert len((await fleet.generate(request())).output_ids) == 16
            processes.started[0].server.is_healthy = False
            member = fleet.roster.members["server-0"]
            fleet.roster.on_change = lambda: str(member.state) == "lost" and processes.started[0].die(-9, "")
            await until(lambda: len(processes.started) == 2 and str(member.state) == "ready", "it is started again")
        told = [line for line in capsys.readouterr().err.splitlines() if " lost: " in line]
        assert told == [f"server-0 lost: {why}" for why in ("/health: ClientConnectorError", KILLED)]

    asyncio.run(check())


def test_why_a_server_could_not_be_brought_up_is_not_replaced_by_the_end_that_the_run_gave_it(running, own, capsys):
    async def check():
        first, second, third = running.server(), running.server(), running.server()
        second.first_fault = ServerLostError("CUDA out of memory")
        starting, processes = own(first, second, third)
        async with starting as fleet:
            assert len((await fleet.generate(request())).output_ids) == 16
            member = fleet.roster.members["server-0"]
            processes.started[0].die(-9, "")
            await until(lambda: len(processes.started) == 3 and str(member.state) == "ready", "the third one serves")
            told = capsys.readouterr().err
        assert "failed its first request: CUDA out of memory" in told
        assert "SIGTERM" not in told

    asyncio.run(check())


def test_a_port_that_was_taken_meanwhile_is_another_try(running, own):
    async def check():
        starting, processes = own("OSError: [Errno 98] Address already in use", running.server())
        async with starting as fleet:
            assert len((await fleet.generate(request())).output_ids) == 16
        assert len(processes.started) == 2

    asyncio.run(check())


@pytest.mark.parametrize(
    ("fates", "words"),
    [
        (["error: unrecognized arguments: --no-such-option"], "--no-such-option"),
        ([RunError("there is no node for the process server-0")], "there is no node"),
        (["address already in use"] * 3, "ended 3 times"),
    ],
)
def test_a_server_that_cannot_be_started_ends_the_start_in_its_words(own, fates, words):
    async def check():
        starting, _ = own(*fates, restarts=2)
        with pytest.raises(RunError, match=words):
            async with starting:
                pass

    asyncio.run(check())


def test_a_server_listens_where_its_node_is_reached_and_is_started_once(running, own, monkeypatch):
    async def check():
        monkeypatch.setenv("KEY", "secret")
        starting, processes = own(running.server(), address="10.0.0.7", api_key="env:KEY")
        async with starting as fleet:
            assert fleet.roster.members["server-0"].connection.address.startswith("http://10.0.0.7:")
        (one,) = processes.specifications
        assert (one.command[0], one.role, one.end) == ("10.0.0.7", "server", EndMeans.REPLACED)
        starting, processes = own(running.server(), address="10.0.0.7")
        with pytest.raises(RunError, match=r"would listen on 10\.0\.0\.7 without a key"):
            async with starting:
                pass
        assert processes.specifications == []

    asyncio.run(check())


def test_a_cause_that_passes_takes_no_server_out_for_good(running, own):
    """A disk is full for a while: no keeper can be started, then the server ends at once, more often than allowed."""

    async def check():
        full = [RunError("its keeper cannot be started: No space left on device")] * 3
        starting, processes = own(
            running.server(),
            *full,
            *["No space left on device"] * 4,
            running.server(),
            restarts=2,
            restart_window_s=0.5,
        )
        async with starting as fleet:
            member = fleet.roster.members["server-0"]
            processes.started[0].die(-9, "")
            await until(lambda: str(member.state) == "refused", "it was given up for now")
            assert set((await fleet.generate(request())).versions) == {0}
            assert processes.fates == []

    asyncio.run(check())


def test_restarts_are_counted_within_a_window_and_not_over_the_whole_life(running, own):
    async def check():
        starting, processes = own(*(running.server() for _ in range(6)), restarts=1, restart_window_s=0.4)
        async with starting as fleet:
            member = fleet.roster.members["server-0"]
            for life in range(5):
                await asyncio.sleep(0.4)
                processes.started[life].die(-9, "")
                await until(lambda n=life: len(processes.started) == n + 2, "it is started again")
                await until(lambda: str(member.state) == "ready", "it is ready again")

    asyncio.run(check())
