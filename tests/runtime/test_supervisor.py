"""What the supervisor does about processes that never join, on a launcher that starts none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from areal_core import background
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import Node, OnExit, ProcessEnd, ProcessGroup
from areal_core.runtime import members, restart_policy
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.launcher import Place

TIMEOUT_S = 30.0
MAIN = ProcessGroup("main", "main", ["-"])


class NeverJoining:
    """Members that never join. Those of some groups have ended already."""

    def __init__(self, *, has_ended: bool) -> None:
        self._has_ended = has_ended

    async def wait(self) -> str:
        if not self._has_ended:
            await asyncio.Event().wait()
        return "no such program"

    async def end(self) -> None:
        self._has_ended = True


class StubLauncher:
    """Starts nothing. Members end immediately, except those of groups in `living`."""

    host = "127.0.0.1"

    def __init__(self, living: Sequence[str] = ("main",), *, blocks: bool = False) -> None:
        self._living, self._blocks = living, blocks
        self.starts: list[str] = []

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        return [Node("here", "127.0.0.1")]

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> NeverJoining:
        self.starts.append(group.name)
        if self._blocks:
            await asyncio.Event().wait()
        return NeverJoining(has_ended=group.name not in self._living)

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "EXIT_REPORT_S", 0.0)
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(background, "_handler", background._handler)  # `listen` replaces it


@asynccontextmanager
async def supervisor_of(launcher: StubLauncher, folder: Path, messages: list[str]) -> AsyncIterator[Supervisor]:
    run = RunFolder(folder)
    supervisor = Supervisor(launcher, run, lambda _: None, messages.append)
    await supervisor.listen()
    supervisor.admit(run.attempt(1))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield supervisor
    finally:
        await supervisor.close()


def replaceable(name: str, role: str) -> ProcessGroup:
    return ProcessGroup(name, role, ["-"], on_exit=OnExit.RESTART)


def test_a_worker_that_never_comes_up_is_restarted_twice_and_then_ends_the_run(tmp_path: Path) -> None:
    async def check() -> None:
        launcher, messages = StubLauncher(), list[str]()
        async with supervisor_of(launcher, tmp_path, messages) as supervisor:
            await supervisor.start([MAIN, replaceable("worker-0", "rollout_worker")])
            with pytest.raises(RunError) as raised:
                await supervisor.watch("main", lambda: None)
            reason = "could not be started 3 times in a row, the last time: never joined: no such program"
            assert raised.value.message == f"worker-0 {reason}"
            assert raised.value.hints == (f"its log: {tmp_path / 'logs/worker-0.log'}",)
            assert launcher.starts == ["main", "worker-0", "worker-0", "worker-0"]
            assert messages[0] == "worker-0 never joined: no such program: it is restarted"

    asyncio.run(check())


def test_a_run_continues_without_a_server_that_never_comes_up(tmp_path: Path) -> None:
    async def check() -> None:
        messages: list[str] = []
        async with supervisor_of(StubLauncher(), tmp_path, messages) as supervisor:
            await supervisor.start([MAIN, replaceable("server-0", "server")])
            watching = asyncio.ensure_future(supervisor.watch("main", lambda: None))
            while not any(message.startswith("server-0 is not restarted: ") for message in messages):
                await asyncio.sleep(0.01)
            await asyncio.wait({watching}, timeout=0.5)
            assert not watching.done()
            watching.cancel()

    asyncio.run(check())


def test_an_essential_process_that_never_joins_ends_the_attempt(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervisor_of(StubLauncher(living=()), tmp_path, []) as supervisor:
            await supervisor.start([MAIN])
            with pytest.raises(LostError, match="main: never joined: no such program"):
                await supervisor.watch("main", lambda: None)
            await supervisor.end_attempt()
            assert supervisor.describe().processes == {}

    asyncio.run(check())


def test_a_rank_that_exits_with_0_before_its_work_is_done_ends_the_run(tmp_path: Path) -> None:
    """Any library may call `os._exit`. The other ranks would wait for this one until a timeout."""

    async def check() -> None:
        async with supervisor_of(StubLauncher(living=("ranks",)), tmp_path, []) as supervisor:
            await supervisor.start([ProcessGroup("ranks", "ranks", ["-"], count=2)])
            hub = supervisor._hub
            hub.remove(hub.processes["ranks", 1], ProcessEnd(0))
            with pytest.raises(RunError, match="ranks-1 ended before its work was done"):
                await supervisor.watch("ranks", lambda: None)

    asyncio.run(check())


def test_a_signal_cancels_the_start(tmp_path: Path) -> None:
    async def check() -> None:
        async with supervisor_of(StubLauncher(blocks=True), tmp_path, []) as supervisor:
            supervisor.signals.append(15)
            with pytest.raises(RunError, match="stopped while processes were started") as raised:
                await supervisor.start([MAIN])
            assert raised.value.exit_code == 128 + 15
            assert supervisor.describe().processes == {}

    asyncio.run(check())
