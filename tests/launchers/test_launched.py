"""A server's process as its starter sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from areal_core.interfaces.launcher import Needs, ProcessEnd
from areal_core.launchers.keepers import Keepers
from areal_core.launchers.launched import LaunchedProcess

HANG_S = 60


def command_of(program):
    return "server", [sys.executable, "-c", program, "a word"], {"GREETING": "hello"}


async def ended(server):
    async with asyncio.timeout(HANG_S):
        while server.is_running:
            await asyncio.sleep(0.01)


def test_a_process_runs_with_its_log_until_it_is_ended(tmp_path):
    async def check():
        keepers = Keepers(tmp_path)
        server = LaunchedProcess(keepers, "server-0", Needs(gpus=(2, 3)))
        assert not server.is_running
        program = (
            "import os, sys, time; print(*sys.argv[1:], os.environ['GREETING'], os.environ['CUDA_VISIBLE_DEVICES'],"
        )
        await server.start(*command_of(f"{program} flush=True); time.sleep(600)"))
        log = tmp_path / "server-0.log"
        async with asyncio.timeout(HANG_S):
            while not log.is_file() or not log.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
        assert log.read_text() == "a word hello 2,3\n"
        assert server.is_running
        await server.end()
        assert not server.is_running
        assert "killed by SIGTERM" in server.last_words()
        await server.end()

    asyncio.run(check())


def test_what_a_process_said_last_is_known_and_it_can_be_started_again(tmp_path):
    async def check():
        server = LaunchedProcess(Keepers(tmp_path), "server-0")
        await server.start(*command_of("raise SystemExit('the port is taken')"))
        await ended(server)
        assert "exit code 1" in server.last_words()
        assert "the port is taken" in server.last_words()
        await server.start(*command_of("import time; time.sleep(600)"))
        assert server.is_running
        await server.end()

    asyncio.run(check())


def test_one_who_no_longer_waits_for_an_end_does_not_take_it_from_others(tmp_path):
    class Ending:
        """A process that was told to end, and whose end is not told yet."""

        def __init__(self):
            self.ended = asyncio.Event()

        async def wait(self):
            await self.ended.wait()
            return ProcessEnd(0, "done")

        async def end(self, grace_s=0.0):
            return None

    class Processes:
        address = "127.0.0.1"

        async def start(self, specification):
            return process

    process = Ending()

    async def check():
        server = LaunchedProcess(Processes(), "server-0")
        await server.start(*command_of(""))
        waiting = asyncio.create_task(server.end())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert server.is_running
        process.ended.set()
        await server.end()
        assert "ended with exit code 0" in server.last_words()

    asyncio.run(check())


def test_a_process_whose_keeper_is_killed_has_ended(tmp_path):
    async def check():
        keepers = Keepers(tmp_path)
        server = LaunchedProcess(keepers, "server-0")
        await server.start(*command_of("import time; time.sleep(600)"))
        os.kill(keepers.processes["server-0"].keeper_pid, signal.SIGKILL)
        await ended(server)
        assert "keeper" in server.last_words()

    asyncio.run(check())
