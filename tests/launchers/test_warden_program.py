"""The warden's program itself: how it ends, and with which Python its processes run."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.launchers.supervised import Node
from areal_core.launchers.warden import ALONE_EXIT_CODE
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from areal_core.messages import Channel

pytestmark = pytest.mark.slow
HANG_S = 60


async def bring(lease_s: float, then: Callable[[Node], Awaitable[None]] | None = None) -> int:
    """The exit code of a warden whose supervisor says nothing, or does something when it has come."""
    credentials, came = Credentials.create(1), asyncio.Event()

    async def say_nothing(channel: Channel) -> None:
        node = Node(channel, await channel.receive())
        came.set()
        if then is not None:
            await then(node)
        await asyncio.sleep(2 * HANG_S)

    server = await serve("tcp:127.0.0.1:0", say_nothing, lambda: credentials)
    words = ["-m", "areal_core.launchers.warden", server.address, str(lease_s)]
    variables = {**os.environ, **credentials.as_environment()}
    warden = await asyncio.create_subprocess_exec(sys.executable, *words, env=variables)
    await came.wait()
    code = await warden.wait()
    server.close()
    return code


def test_it_says_whether_it_was_left_alone() -> None:
    silent, gone = bring(1.0), bring(10.0 * HANG_S, lambda node: node.channel.close())
    dismissed = bring(10.0 * HANG_S, Node.dismiss)
    assert asyncio.run(asyncio.wait_for(silent, HANG_S)) == ALONE_EXIT_CODE
    assert asyncio.run(asyncio.wait_for(gone, HANG_S)) == ALONE_EXIT_CODE
    assert asyncio.run(asyncio.wait_for(dismissed, HANG_S)) == 0


def test_a_python_of_its_own_runs_all_programs_of_areal(tmp_path: Path) -> None:
    (tmp_path / "environment").symlink_to(sys.prefix)
    own = str(tmp_path / "environment" / "bin" / os.path.basename(sys.executable))  # noqa: PTH119 - not followed

    class Elsewhere(LocalLauncher):
        def bring(self, command, environment) -> int:
            return super().bring([own, *command[1:]], environment)

    async def work() -> None:
        launcher = Elsewhere(LocalSettings())
        nothing = dict.fromkeys(("on_message", "on_end", "on_notice", "on_visitor"), lambda *_: None)
        wardens = Wardens(Credentials.create(1), **nothing)
        await wardens.listen("127.0.0.1")
        try:
            await wardens.bring(launcher, print, tmp_path)
            for name, command in {"ours": (sys.executable, "-c", CODE), "theirs": ("/bin/echo", "by itself")}.items():
                process = wardens.start(ProcessSpecification(name, "test", command), tmp_path / f"{name}.log")
                assert (await process.wait()).code == 0
        finally:
            await wardens.close()
            await asyncio.to_thread(launcher.close)

    asyncio.run(asyncio.wait_for(work(), HANG_S))
    assert (tmp_path / "ours.log").read_text().strip() == own
    assert (tmp_path / "theirs.log").read_text().strip() == "by itself"


CODE = "import sys; print(sys.executable)"
