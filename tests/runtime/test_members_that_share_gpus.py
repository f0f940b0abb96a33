"""Servers that share their GPUs with the trainer: none is started in its turn, whatever has ended there."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.interfaces.launcher import OnExit, ProcessGroup
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.settings import LocalSettings
from areal_testing.conformance.launchers import driven

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CONTROLLER = """
import sys, time
from pathlib import Path
from areal_core.runtime.member import run_role
from areal_core.runtime.messages import ColocatedTraining

def play(member):
    folder = Path(sys.argv[1])
    while True:
        for name, has_begun in (("begin", True), ("end", False)):
            while not (folder / name).exists():
                time.sleep(0.01)
            (folder / name).unlink()
            if has_begun:
                member.request(ColocatedTraining(True), None, "the turn").result()
                (folder / "begun").touch()
            else:
                member.notify(ColocatedTraining(False))

run_role(play)
"""
LOADING = """
import sys, time
from pathlib import Path
from areal_core.runtime.member import run_role

def play(member):
    (Path(sys.argv[1]) / "loading").touch()
    while not (Path(sys.argv[1]) / "loaded").exists():
        time.sleep(0.01)
    member.announce("server", "http://late")
    time.sleep(600)

run_role(play)
"""


def test_a_server_that_dies_in_the_trainers_turn_is_started_when_that_ends(tmp_path: Path) -> None:
    async def until(folder: Path, name: str) -> None:
        async with asyncio.timeout(60):
            while not (folder / name).exists():
                await asyncio.sleep(0.01)

    def program(folder: Path, name: str, text: str, **more: bool | OnExit) -> ProcessGroup:
        return ProcessGroup(name, name, [sys.executable, "-c", text, str(folder)], **more)  # type: ignore[arg-type]

    async def run() -> None:
        launcher = LocalLauncher(LocalSettings(fork_server=False))
        async with driven(launcher, tmp_path / "run", 60.0) as session:
            folder = session.folder
            sharing = {"on_exit": OnExit.RESTART, "shares_gpus": True}
            groups = [session.group("server-0", **sharing), program(folder, "server-1", LOADING, **sharing)]
            await session.driver.start([program(folder, "controller", CONTROLLER), *groups])
            first = await session.report_of("server-0")
            await until(folder, "loading")
            (folder / "begin").touch()
            await asyncio.sleep(0.5)
            assert not (folder / "begun").exists(), "a server that loads is not waited for"
            (folder / "loaded").touch()
            await until(folder, "begun")
            (folder / "server-0.json").unlink()
            (folder / "die-server-0").touch()
            await asyncio.sleep(1.5)
            assert "server-0" not in session.processes(), "it is started in the trainer's turn"
            (folder / "end").touch()
            assert (await session.report_of("server-0"))["pid"] != first["pid"]

    asyncio.run(run())
