"""A fleet in a program that is no run: it starts its servers on this machine itself, and ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_core.engines import ModelReference, WeightUpdate
from areal_core.errors import RunError
from areal_core.inference import lifecycle
from areal_core.inference.adapter import ServerCommand
from areal_core.inference.fleet import ServerFleet
from areal_core.inference.settings import FleetSettings
from areal_core.servers import ServerUnreachableError

SERVE = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
sys.stdin.read()
"""
PATIENCE_S = 60


@pytest.fixture
def adapter(running):
    """An adapter whose servers are fake ones that answer while a program runs, which the fleet has to start."""

    class Programs(type(running.adapter)):
        words = (sys.executable, "-c", SERVE)

        def command(self, model, host, port, scratch):
            if not self.words:
                return super().command(model, host, port, scratch)
            self.scratch, address = scratch, f"http://{host}:{port}"
            self.servers[address] = running.server()
            self.notes[address] = scratch / f"{port}.txt"
            return ServerCommand([*self.words, str(self.notes[address])])

        async def check_health(self, connection, timeout_s):
            if connection.address in self.notes and not self.notes[connection.address].exists():
                raise ServerUnreachableError("it has not started")
            await super().check_health(connection, timeout_s)

    def make(**settings):
        made = Programs(FleetSettings(**{"health_interval_s": 0.02, "start_timeout_s": PATIENCE_S, **settings}), {})
        made.notes = {}
        return made

    return make


@pytest.fixture
def started(running, tmp_path):
    """`async with started(adapter, gpus) as fleet`."""

    @asynccontextmanager
    async def start(adapter, gpus=None):
        fleet = ServerFleet(adapter, tmp_path / "logs", gpus=gpus)
        try:
            model = running.write_weights(tmp_path / "model")
            await asyncio.wait_for(fleet.start(ModelReference(str(model), "float32")), PATIENCE_S)
            yield fleet
        finally:
            await fleet.close()

    return start


def pids(fleet):
    return {name: process.pid for name, process in fleet._local.processes.items()}


def test_servers_are_started_and_end_with_the_fleet(running, adapter, started):
    async def check():
        made = adapter(servers={"minimum": 2, "maximum": 2})
        async with started(made) as fleet:
            assert running.states(fleet) == {"server-0": "ready", "server-1": "ready"}
            assert set((await fleet.generate(running.request())).versions) == {0}
        await fleet.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids(fleet).values())
        assert not made.scratch.exists()

    asyncio.run(check())


def test_one_that_dies_is_started_again_with_the_current_weights(running, adapter, started, tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "RECOVERY_S", 30.0)

    async def check():
        async with started(adapter()) as fleet:
            await fleet.update_weights(WeightUpdate(1, running.write_weights(tmp_path / "v1")))
            (former,) = pids(fleet).values()
            os.kill(former, signal.SIGKILL)
            await running.until(lambda: "its process has ended" in running.log(), "it is lost")
            assert set((await asyncio.wait_for(fleet.generate(running.request()), PATIENCE_S)).versions) == {1}
            assert pids(fleet)["server-0"] != former

    asyncio.run(check())


def test_none_is_started_while_the_trainer_has_the_gpus(running, adapter, started, tmp_path):
    async def check():
        made = adapter(servers={"minimum": 2, "maximum": 2})
        async with started(made) as fleet:
            await fleet.sleep()
            os.kill(pids(fleet)["server-1"], signal.SIGKILL)
            await running.until(lambda: "its process has ended" in running.log(), "it is lost")
            await asyncio.sleep(0.3)
            assert len(made.notes) == 2, "a third server was started"
            await fleet.update_weights(WeightUpdate(1, running.write_weights(tmp_path / "v1")))
            await running.until(lambda: set(running.states(fleet).values()) == {"ready"}, "both are ready")
            assert len(made.notes) == 3

    asyncio.run(check())


def test_each_server_sees_its_own_gpus(adapter, started, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    async def check():
        made = adapter(servers={"minimum": 2, "maximum": 2}, tensor_parallel=2)
        async with started(made, gpus=[0, 1, 2, 3]):
            assert {note.read_text() for note in made.notes.values()} == {"0,1", "2,3"}

    asyncio.run(check())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit('no model')"), "exit code 1; the end of its log:\nno model"),
        (("/no/such/program",), "/no/such/program cannot be started: No such file or directory"),
        ((), "areal cannot start Fake servers"),
    ],
    ids=["it ends", "there is no program", "the adapter has no command"],
)
def test_one_that_cannot_be_started_ends_the_start_with_the_reason(adapter, started, words, reason):
    async def check():
        made = adapter()
        made.words = words
        async with started(made):
            pass

    with pytest.raises(RunError, match=r"0 of 1 servers are ready") as caught:
        asyncio.run(check())
    assert reason in str(caught.value)
