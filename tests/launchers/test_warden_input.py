"""A warden that is told to ends with its standard input, and with it everything that it has started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from areal_core.interfaces.launcher import UNTIL_INPUT_ENDS, ProcessSpecification
from areal_core.launchers.identity import processes_with
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
HANG_S = 60
WARDEN = (sys.executable, "-m", "areal_core.launchers.warden")


class Held(LocalLauncher):
    """Holds the other end of the warden's input."""

    def bring(self, command, environment) -> int:
        variables = {**os.environ, **environment}
        words = [*command, UNTIL_INPUT_ENDS]
        self.warden = self._wardens["held"] = subprocess.Popen(words, env=variables, stdin=subprocess.PIPE)
        return 1


async def ended(warden: subprocess.Popen[bytes]) -> int | None:
    deadline = time.monotonic() + HANG_S
    while warden.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return warden.poll()


async def _ignore(*_: object) -> None:
    """Nobody comes."""


def test_it_ends_what_it_has_started(tmp_path: Path) -> None:
    credentials, launcher = Credentials.create(1), Held(LocalSettings())

    async def work() -> None:
        wardens = Wardens(
            credentials, on_message=print, on_end=lambda *_: None, on_notice=lambda *_: None, on_visitor=_ignore
        )
        await wardens.listen("127.0.0.1")
        await wardens.bring(launcher, print, tmp_path)
        command = ["sh", "-c", "setsid sleep 600 & touch up; sleep 600"]
        wardens.start(ProcessSpecification("left", "test", ["env", "-C", str(tmp_path), *command]), tmp_path / "log")
        deadline = time.monotonic() + HANG_S
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        launcher.warden.stdin.write(b"words say nothing\n")
        launcher.warden.stdin.flush()
        await asyncio.sleep(0.5)
        assert launcher.warden.poll() is None
        assert len(processes_with("AREAL_TOKEN", credentials.token)) >= 4
        launcher.warden.stdin.close()
        assert await ended(launcher.warden) == 0
        assert processes_with("AREAL_TOKEN", credentials.token) == []
        await wardens.close()

    asyncio.run(work())
    launcher.close()


def test_it_does_not_wait_for_a_supervisor_that_nobody_waits_for_any_more() -> None:
    launcher = Held(LocalSettings())
    launcher.bring([*WARDEN, "tcp:127.0.0.1:1", "60"], Credentials.create(1).as_environment())
    launcher.warden.stdin.close()
    assert asyncio.run(ended(launcher.warden)) == 0
