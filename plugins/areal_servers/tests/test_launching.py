"""A server's process as its starter sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from areal_core.interfaces import EndMeans, ProcessEnd
from areal_core.launchers.keepers import Keepers
from areal_servers.interface import ServerCommand
from areal_servers.launching import LaunchedServer

HANG_S = 60


def command_of(program):
    return lambda host, port: ServerCommand([sys.executable, "-c", program, host, str(port)], {"GREETING": "hello"})


async def ended(server):
    async with asyncio.timeout(HANG_S):
        while server.is_running:
            await asyncio.sleep(0.01)


def test_a_process_runs_with_its_log_until_it_is_ended(tmp_path):
    async def check():
        keepers = Keepers(tmp_path)
        server = LaunchedServer(keepers, "server-0", gpus=[2, 3])
        assert not server.is_running
        program = (
            "import os, sys, time; print(*sys.argv[1:], os.environ['GREETING'], os.environ['CUDA_VISIBLE_DEVICES'],"
        )
        address = await server.start(command_of(f"{program} flush=True); time.sleep(600)"))
        log = tmp_path / "server-0.log"
        async with asyncio.timeout(HANG_S):
            while not log.is_file() or not log.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
        host, port, *rest = log.read_text().split()
        assert address == f"http://{host}:{port}"
        assert (host, rest) == ("127.0.0.1", ["hello", "2,3"])
        assert server.is_running
        await server.end()
        assert not server.is_running
        assert "killed by SIGTERM" in server.last_words()
        await server.end()

    asyncio.run(check())


def test_what_a_process_said_last_is_known_and_it_can_be_started_again(tmp_path):
    async def check():
        server = LaunchedServer(Keepers(tmp_path), "server-0")
        await server.start(command_of("raise SystemExit('the port is taken')"))
        await ended(server)
        assert "exit code 1" in server.last_words()
        assert "the port is taken" in server.last_words()
        await server.start(command_of("import time; time.sleep(600)"))
        assert server.is_running
        await server.end()

    asyncio.run(check())


def test_a_process_whose_keeper_is_killed_has_ended(tmp_path):
    async def check():
        keepers = Keepers(tmp_path)
        server = LaunchedServer(keepers, "server-0")
        await server.start(command_of("import time; time.sleep(600)"))
        os.kill(keepers.processes["server-0"].keeper_pid, signal.SIGKILL)
        await ended(server)
        assert "keeper" in server.last_words()

    asyncio.run(check())


class Elsewhere:
    """Starts nothing, on a node of another address."""

    name, address = "server-0", "10.0.0.7"

    def __init__(self):
        self.specifications = []
        self._over = asyncio.Event()

    async def start(self, specification):
        self.specifications.append(specification)
        self._over = asyncio.Event()
        return self

    async def wait(self):
        await self._over.wait()
        return ProcessEnd(0, "")

    async def end(self, grace_s=0.0):
        self._over.set()
        return ProcessEnd(0, "")


def test_a_server_listens_where_its_node_is_reached():
    async def check():
        processes = Elsewhere()
        server = LaunchedServer(processes, "server-0", gpus=[1])
        address = await server.start(command_of("pass"))
        assert address.startswith("http://10.0.0.7:")
        assert [one.command[3] for one in processes.specifications] == ["127.0.0.1", "10.0.0.7"]
        last = processes.specifications[-1]
        assert (last.role, last.needs.gpus, last.end) == ("server", (1,), EndMeans.REPLACED)
        await server.end()
        await server.start(command_of("pass"))
        assert processes.specifications[-1].command[3] == "10.0.0.7"
        assert len(processes.specifications) == 3, "it is known now"
        await server.end()

    asyncio.run(check())
