"""Conformance suite of launchers: they start members where a run places them, and end all of their processes.

The core's driver drives the launcher here. Its protocol with launchers and members is private: only this suite and
`launched_member` import private names of the core (tests/architecture has the list).
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

VARIABLE, VALUE = "CONFORMANCE_VARIABLE", """two words, "quoted", isn't $HOME"""
POLL_S = 0.02


class LauncherSuite(ComponentSuite):
    """Tests of a launcher. Set `component` and `settings`, or override `make`. The nodes must be parts of this machine.

    Attributes:
        nodes: number of the launcher's nodes.
        patience_s: seconds after which a wait fails the test.
    """

    kind: ClassVar[str] = "launchers"
    nodes: ClassVar[int] = 1
    patience_s: ClassVar[float] = 120.0

    def start_nodes(self, run_dir: Path) -> None:
        """Start the nodes if machines join a run, each with a unique name in `AREAL_NODE`. Does nothing by default."""

    def test_nodes_have_unique_names(self, tmp_path: Path) -> None:
        """The launcher has `nodes` nodes with addresses, and the same names if it is asked again."""

        async def body(session: Session) -> None:
            answers = [await session.launcher.nodes([session.group("worker")]) for _ in range(2)]
            names = [[node.name for node in nodes] for nodes in answers]
            assert len(set(names[0])) == len(names[0]) == self.nodes, (
                f"the launcher must have {self.nodes} nodes with unique names, but they are {names[0]}"
            )
            assert names[0] == names[1], f"asked again, nodes have other names: {names}"
            assert all(node.address for node in answers[0]), "a node has no address"

        self._run(tmp_path, body)

    def test_members_start_where_they_were_placed_with_their_variables(self, tmp_path: Path) -> None:
        """Each member of a group of two has its index, its node, and the group's variables without changes."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2, environment={VARIABLE: VALUE})])
            for index in range(2):
                report = await session.report_of(f"gang-{index}")
                assert report["index"] == index, f"member {index} has the index {report['index']}"
                assert report["variable"] == VALUE, f"{VARIABLE} is {report['variable']}"
                host = session.processes()[f"gang-{index}"].host
                assert report["node"] == host, f"member {index} was placed on {host} and runs on {report['node']}"

        self._run(tmp_path, body)

    def test_a_killed_member_is_reported_and_leaves_nothing(self, tmp_path: Path) -> None:
        """The driver raises LostError. No process of the member is left, also in other sessions."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.report_of(f"gang-{index}")
            (session.folder / "die-gang-1").touch()
            with pytest.raises(LostError, match=r"gang-1 .*was killed by SIGKILL"):
                await asyncio.wait_for(session.driver.watch("gang", lambda: None), self.patience_s)
            await session.driver.end_attempt()
            session.assert_no_process_remains()

        self._run(tmp_path, body)

    def test_a_restartable_member_is_started_again(self, tmp_path: Path) -> None:
        """A member of a group with `OnExit.RESTART` that dies is started again, and other members keep running."""

        async def body(session: Session) -> None:
            groups = [session.group("stays"), session.group("goes", on_exit=OnExit.RESTART)]
            await session.driver.start(groups)
            first, stays = await session.report_of("goes"), await session.report_of("stays")
            (session.folder / "goes.json").unlink()
            (session.folder / "die-goes").touch()
            second = await session.report_of("goes")
            assert second["pid"] != first["pid"], "it was not started again"
            assert (await session.report_of("stays"))["pid"] == stays["pid"], "another member was started again"

        self._run(tmp_path, body)

    def test_a_command_that_cannot_start_is_reported(self, tmp_path: Path) -> None:
        """The error names the command, and comes long before the driver's timeout for registration."""

        async def body(session: Session) -> None:
            group = ProcessGroup("broken", "broken", ["/no/such/program"])

            async def start() -> None:
                await session.driver.start([group])
                await asyncio.wait_for(session.driver.watch("broken", lambda: None), self.patience_s)

            with pytest.raises(RunError) as caught:
                await start()
            message = str(caught.value)
            assert "broken" in message or "/no/such/program" in message, f"the error does not name it: {message}"

        self._run(tmp_path, body)

    def test_nothing_is_left_when_close_returns(self, tmp_path: Path) -> None:
        """`close` ends members that do not react, and the processes that they have started."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.report_of(f"gang-{index}")
            await session.driver.close()
            session.assert_no_process_remains()
            await session.driver.close()

        self._run(tmp_path, body)

    def test_groups_end_without_the_driver(self, tmp_path: Path) -> None:
        """All members end if the hub closes its connections, as the kernel does after the driver was killed."""

        async def body(session: Session) -> None:
            await session.driver.start([session.group("gang", count=2)])
            for index in range(2):
                await session.report_of(f"gang-{index}")
            session.driver.abandon()
            deadline = time.monotonic() + self.patience_s
            while session.remaining() and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            session.assert_no_process_remains()

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
        with suppress(OSError):  # the run may not have started
            run.attempt(1).released.write_text("done 1")  # machines that have joined the run wait for this file


class Session:
    """A driver with a launcher in a run folder, and the reports of its members.

    Args:
        launcher: the launcher.
        driver: starts the members with the launcher.
        run: the run folder.
        lines: the driver's log, which grows.
        patience_s: seconds after which a wait fails the test.

    Attributes:
        folder: folder of the members' reports.
    """

    def __init__(
        self, launcher: Launcher, driver: Supervisor, run: RunFolder, lines: list[str], patience_s: float
    ) -> None:
        self.launcher, self.driver, self.run = launcher, driver, run
        self.folder = run.path / "members"
        self._lines, self._patience_s = lines, patience_s

    def group(self, name: str, **options: Any) -> ProcessGroup:
        """Return a group of stand-in members."""
        command = [sys.executable, "-m", "areal_testing.conformance.launched_member", str(self.folder)]
        return ProcessGroup(name, name, command, **options)

    async def report_of(self, name: str) -> dict[str, Any]:
        """Wait until a member has started, and return its report."""
        deadline = time.monotonic() + self._patience_s
        path = self.folder / f"{name}.json"
        while not path.exists():
            assert time.monotonic() < deadline, f"{name} has not started; the log is {self._lines}"
            await asyncio.sleep(POLL_S)
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def processes(self) -> Any:
        """Return the processes of the run, by name."""
        return self.driver.describe().processes

    def remaining(self) -> dict[int, str]:
        """Return the pids of the run's processes and their commands, including orphans in other sessions.

        Every process that a launcher starts has the secret of the run in its environment.
        """
        secret = self.run.attempt(1).token.read_bytes()
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if secret in (process / "environ").read_bytes():
                    commands[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return commands

    def assert_no_process_remains(self) -> None:
        """Assert that no process of the run remains, except programs with which a machine joins it."""
        commands = self.remaining().values()
        remaining = [command for command in commands if "areal_core" not in command or " node " not in command]
        assert not remaining, f"processes of the run still exist: {remaining}"
