"""What a launcher must do: start members where they were placed, with their variables, and end what is left.

A run drives the launcher here: the core's supervisor, whose protocol with launchers and members is private. This suite
and `launched_member` are the only ones that import private names of the core (tests/architecture has the list).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_core.driver.supervision import supervising
from areal_core.errors import LostError, RunError
from areal_core.launchers import OnExit, ProcessGroup
from areal_core.programs import RunFolder
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from areal_core.launchers import Launcher
    from areal_core.runtime.supervisor import Supervisor

VARIABLE, VALUE = "CONFORMANCE_WORDS", """two words, "quoted", isn't $HOME"""
POLL_S = 0.02


class LauncherSuite(ComponentSuite):
    """Set `component` and `settings`, or override `make`; the nodes must be parts of this machine.

    Attributes:
        nodes: how many the launcher has.
        patience_s: for anything to happen.
    """

    kind: ClassVar[str] = "launchers"
    nodes: ClassVar[int] = 1
    patience_s: ClassVar[float] = 120.0

    def start_nodes(self, run_dir: Path) -> None:
        """Where machines come by themselves: start them, each with a name of its own in `AREAL_NODE`."""

    def test_nodes_have_names_of_their_own(self, tmp_path: Path) -> None:
        """As many as there are, and the same ones when it is asked again."""

        async def body(session: Session) -> None:
            asked = [await session.launcher.nodes([session.group("worker")]) for _ in range(2)]
            names = [[node.name for node in nodes] for nodes in asked]
            assert len(set(names[0])) == len(names[0]) == self.nodes, (
                f"there are {self.nodes} nodes, and they are called {names[0]}"
            )
            assert names[0] == names[1], f"asked again, nodes have other names: {names}"
            assert all(node.address for node in asked[0]), "a node has no address"

        self._run(tmp_path, body)

    def test_members_come_where_they_were_placed_with_what_they_are_told(self, tmp_path: Path) -> None:
        """A gang of two members: each knows which one it is, and has the group's variables whole."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2, environment={VARIABLE: VALUE})])
            for index in range(2):
                told = await session.told(f"gang-{index}")
                assert told["index"] == index, f"member {index} takes itself for {told['index']}"
                assert told["variable"] == VALUE, f"{VARIABLE} is {told['variable']}"
                place = session.processes()[f"gang-{index}"].host
                assert told["node"] == place, f"member {index} was placed on {place} and is on {told['node']}"

        self._run(tmp_path, body)

    def test_a_member_that_is_killed_is_noticed_and_leaves_nothing(self, tmp_path: Path) -> None:
        """Neither what it started in sessions of their own, nor a place that is still taken."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.told(f"gang-{index}")
            (session.folder / "die-gang-1").touch()
            with pytest.raises(LostError, match=r"gang-1 .*was killed by SIGKILL"):
                await asyncio.wait_for(session.driver.watch("gang", lambda: None), self.patience_s)
            await session.driver.end_attempt()
            session.must_be_empty()

        self._run(tmp_path, body)

    def test_a_member_that_may_be_replaced_is_started_again(self, tmp_path: Path) -> None:
        """By itself, and the others stay."""

        async def body(session: Session) -> None:
            groups = [session.group("stays"), session.group("goes", on_exit=OnExit.RESTART)]
            await session.driver.start(groups)
            first, stays = await session.told("goes"), await session.told("stays")
            (session.folder / "goes.json").unlink()
            (session.folder / "die-goes").touch()
            second = await session.told("goes")
            assert second["pid"] != first["pid"], "it was not started again"
            assert (await session.told("stays"))["pid"] == stays["pid"], "another member was started again"

        self._run(tmp_path, body)

    def test_a_command_that_cannot_be_started_is_told(self, tmp_path: Path) -> None:
        """At once or by its group's end, and long before a member would be given up."""

        async def body(session: Session) -> None:
            group = ProcessGroup("broken", "broken", ["/no/such/program"])

            async def start() -> None:
                await session.driver.start([group])
                await asyncio.wait_for(session.driver.watch("broken", lambda: None), self.patience_s)

            with pytest.raises(RunError) as told:
                await start()
            assert "broken" in str(told.value) or "/no/such/program" in str(told.value), f"it is told: {told.value}"

        self._run(tmp_path, body)

    def test_nothing_is_left_when_close_returns(self, tmp_path: Path) -> None:
        """Also of members that do not listen, and of what they have started."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.told(f"gang-{index}")
            await session.driver.close()
            session.must_be_empty()
            await session.driver.close()

        self._run(tmp_path, body)

    def test_groups_end_by_themselves_when_the_driver_is_gone(self, tmp_path: Path) -> None:
        """The hub closes its connections, as the kernel does when a driver is killed."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.told(f"gang-{index}")
            session.driver.abandon()
            deadline = time.monotonic() + self.patience_s
            while session.left() and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            session.must_be_empty()

        self._run(tmp_path, body)

    def _run(self, tmp_path: Path, body: Callable[[Session], Awaitable[None]]) -> None:
        async def scenario() -> None:
            async with driven(self.make(), tmp_path / "run", self.patience_s) as session:
                self.start_nodes(session.run.path)
                await body(session)

        asyncio.run(scenario())


@asynccontextmanager
async def driven(launcher: Launcher, run_dir: Path, patience_s: float) -> AsyncIterator[Session]:
    """Drive a launcher in a new run folder inside the block. All members end with the block."""
    run, lines = RunFolder(run_dir), list[str]()
    try:
        async with supervising(launcher, run, lambda *_: None, lines.append) as driver:
            session = Session(launcher, driver, run, lines, patience_s)
            session.folder.mkdir()
            yield session
    finally:
        with suppress(OSError):  # the run may never have begun
            run.attempt(1).released.write_text("done 1")  # machines that have joined the run wait for it


class Session:
    """A driver with a launcher in a run folder, and what its members have written.

    Args:
        launcher: the launcher.
        driver: starts the members by it.
        run: the run folder.
        lines: the log of the driver, which it goes on writing.
        patience_s: seconds for anything to happen.

    Attributes:
        folder: folder with what the members write.
    """

    def __init__(
        self, launcher: Launcher, driver: Supervisor, run: RunFolder, lines: list[str], patience_s: float
    ) -> None:
        self.launcher, self.driver, self.run = launcher, driver, run
        self.folder = run.path / "members"
        self._lines, self._patience_s = lines, patience_s

    def group(self, name: str, **more: Any) -> ProcessGroup:
        """Return a group of stand-in members."""
        command = [sys.executable, "-m", "areal_testing.conformance.launched_member", str(self.folder)]
        return ProcessGroup(name, name, command, **more)

    async def told(self, name: str) -> dict[str, Any]:
        """What a member has written when it had come."""
        deadline = time.monotonic() + self._patience_s
        path = self.folder / f"{name}.json"
        while not path.exists():
            assert time.monotonic() < deadline, f"{name} has not come; the log is {self._lines}"
            await asyncio.sleep(POLL_S)
        told: dict[str, Any] = json.loads(path.read_text())
        return told

    def processes(self) -> Any:
        """Those of the run, by name."""
        return self.driver.describe().processes

    def left(self) -> dict[int, str]:
        """Return the processes of the run with their commands, orphans in sessions of their own among them.

        Every process that a launcher starts has the secret of the run in its environment.
        """
        secret = self.run.attempt(1).token.read_bytes()
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if secret in (process / "environ").read_bytes():
                    commands[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return commands

    def must_be_empty(self) -> None:
        """Nothing of the run is left, except for programs that let a machine join it."""
        commands = self.left().values()
        left = [command for command in commands if "areal_core" not in command or " node " not in command]
        assert not left, f"processes of the run are still there: {left}"
