"""What a launcher must do: bring one warden to each node, say which are lost, and end them all, confirmed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import NODE_VARIABLE, ProcessSpecification
from areal_core.launchers.identity import processes_with
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Channel, Credentials
from areal_core.messages.processes import Owner
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import claim, release
from areal_core.testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from areal_core.interfaces.launcher import Launcher
    from areal_core.launchers.supervised import Node

VARIABLE, VALUE = "CONFORMANCE_WORDS", """two words, "quoted", isn't $HOME"""
ORPHANS = "setsid sleep 600 & sleep 600 & touch {up}; sleep 600"
WARDEN = b"areal_core.launchers.warden"
POLL_S = 0.02


class LauncherSuite(ComponentSuite):
    """Set `component` and `settings`, or override `make`; the nodes must be processes of this machine.

    Attributes:
        nodes: how many the launcher brings: at least two.
        brings: False where nodes join by themselves; override `start_nodes` then.
        ends_stopped_nodes: whether it ends a node whose warden does not listen any more; otherwise its lease does.
        patience_s: for anything to happen.
    """

    kind: ClassVar[str] = "launchers"
    nodes: ClassVar[int] = 2
    brings: ClassVar[bool] = True
    ends_stopped_nodes: ClassVar[bool] = True
    patience_s: ClassVar[float] = 120.0

    def start_nodes(self, run_dir: Path) -> None:
        """Where nodes join by themselves: start them, each with a name of its own in `AREAL_NODE`."""

    def signal_warden(self, node: Node, number: int) -> None:
        """Send a signal to the warden of a node, which may stand in a process namespace of its own."""
        named = f"{NODE_VARIABLE}={node.name}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                own = (path / "status").read_text().partition("NSpid:")[2].partition("\n")[0].split()[-1:]
                known = (path / "environ").read_bytes().split(b"\0")
                if own == [str(node.ready.pid)] and named in known and WARDEN in (path / "cmdline").read_bytes():
                    os.kill(int(path.name), number)
                    return
        raise AssertionError(f"no process of this machine is the warden of {node.name}")

    def test_each_node_has_one_warden_and_a_name_of_its_own(self, tmp_path: Path) -> None:
        """As many wardens come as `bring` says, each under another name."""

        async def work() -> None:
            async with _Session(self, self.make(), tmp_path) as session:
                names = sorted(session.wardens.nodes)
                assert len(names) == self.nodes, f"{self.nodes} nodes were to come, and there are {names}"
                assert not any(name.endswith("'") for name in names), f"nodes have one name: {names}"
                assert dict(session.launcher.lost()) == {}, "nodes that are there are called lost"

        self._run(work())

    def test_a_warden_has_the_environment_that_is_given(self, tmp_path: Path) -> None:
        """Variables arrive whole, whatever characters they have, and reach the node's processes."""
        self._only_where_it_brings()

        async def work() -> None:
            async with _Session(self, self.make(), tmp_path) as session:
                for name in session.wardens.nodes:
                    code = f"import os; print(os.environ.get({VARIABLE!r}, 'nothing'))"
                    end = await session.start(f"shown-{name}", [sys.executable, "-c", code], name).wait()
                    assert end.last_words == VALUE, f"{VARIABLE} is {end.last_words} on {name}, not {VALUE}"

        self._run(work())

    def test_a_node_whose_warden_is_killed_is_lost_by_name(self, tmp_path: Path) -> None:
        """`lost` names that node, with a reason, and no other one."""
        self._only_where_it_brings()

        async def work() -> None:
            async with _Session(self, self.make(), tmp_path) as session:
                victim = sorted(session.wardens.nodes)[0]
                self.signal_warden(session.wardens.nodes[victim], signal.SIGKILL)
                await self._until(session.launcher.lost, "a node whose warden was killed is not called lost")
                # A launcher may know the node by another name than the warden's, where there is only one of it.
                lost = dict(session.launcher.lost())
                assert len(lost) == 1, f"one warden was killed, and lost are {lost}"
                assert lost.get(victim), f"{victim} was killed, and lost are {lost}"

        self._run(work())

    def test_the_end_is_confirmed_when_close_returns(self, tmp_path: Path) -> None:
        """Nothing that a node has started is left, in whatever session; a second `close` does no harm."""

        async def work() -> None:
            async with _Session(self, self.make(), tmp_path) as session:
                await session.start_orphans()
                await session.close()
                assert session.left() == [], "close has returned, and processes of the run are there"
                await session.close()

        self._run(work())

    def test_a_node_that_does_not_listen_any_more_is_ended(self, tmp_path: Path) -> None:
        """A warden that was stopped does not keep its node."""
        if not self.ends_stopped_nodes:
            pytest.skip("this launcher leaves a node that does not listen to its lease")

        async def work() -> None:
            async with _Session(self, self.make(), tmp_path) as session:
                await session.start_orphans()
                for node in session.wardens.nodes.values():
                    self.signal_warden(node, signal.SIGSTOP)
                await session.close()
                await self._until(lambda: not session.left(), "close has returned, and stopped nodes go on")

        self._run(work())

    def test_nodes_are_brought_a_second_time(self, tmp_path: Path) -> None:
        """By another launcher of one program, as when a run goes back to a checkpoint; nodes keep their names."""

        async def work() -> None:
            names = []
            for number in (1, 2):
                async with _Session(self, self.make(), tmp_path / str(number)) as session:
                    names.append(sorted(session.wardens.nodes))
                assert session.left() == []
            assert names[0] == names[1], f"nodes have other names the second time: {names}"

        self._run(work())

    def test_a_node_that_cannot_be_brought_is_told(self, tmp_path: Path) -> None:
        """A warden that ends at once is called lost, with a reason, or `bring` raises a `RunError`."""
        self._only_where_it_brings()
        launcher = self.make()

        async def work() -> None:
            assert launcher.host
            try:
                await asyncio.to_thread(launcher.bring, [sys.executable, "-c", "raise SystemExit(7)"], {})
                await self._until(lambda: len(launcher.lost()) == self.nodes, "wardens that end are not called lost")
                assert all(launcher.lost().values()), f"no reason is told: {launcher.lost()}"
            except RunError:
                return
            finally:
                await asyncio.to_thread(launcher.close)

        self._run(work())

    def _only_where_it_brings(self) -> None:
        if not self.brings:
            pytest.skip("nodes join by themselves: nobody hands them anything, or sees more of them than the core does")

    def _run(self, work: Awaitable[None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(4 * self.patience_s):
                await work

        asyncio.run(limited())

    async def _until(self, condition: Callable[[], object], words: str) -> None:
        deadline = time.monotonic() + self.patience_s
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, f"{words}, within {self.patience_s:g} s"
            await asyncio.sleep(POLL_S)


class _Observed:
    """A launcher whose `bring` is given one more variable, and held to its number."""

    def __init__(self, launcher: Launcher, nodes: int) -> None:
        self._launcher = launcher
        self._nodes = nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        count = self._launcher.bring(command, {**environment, VARIABLE: VALUE})
        assert count == self._nodes, f"bring says that {count} nodes will come, and not {self._nodes}"
        return count


class _Session:
    """The supervisor's side of a launcher, with a run folder in which nodes find it."""

    def __init__(self, suite: LauncherSuite, launcher: Any, run_dir: Path) -> None:
        self._suite = suite
        self.launcher = _Observed(launcher, suite.nodes)
        self._credentials = Credentials.create(1)
        self._epoch = RunFolder(run_dir).epoch(1)
        nothing: dict[str, Any] = dict.fromkeys(("on_message", "on_end", "on_notice"), lambda *_: None)
        self.wardens = Wardens(self._credentials, **nothing, on_visitor=self._answer)

    async def _answer(self, channel: Channel) -> None:
        while True:
            _, number = await channel.receive_request()
            is_ending = self.wardens.is_closing
            channel.reply(number, Owner("here", os.getpid(), 1, {}, {}, {}, is_ending=is_ending))

    async def __aenter__(self) -> Self:
        try:
            await self.wardens.listen(await asyncio.to_thread(getattr, self.launcher, "host"))
            claim(self._epoch, self.wardens.address, self._credentials)
            self._suite.start_nodes(self._epoch.run)
            launcher: Any = self.launcher
            await self.wardens.bring(launcher, print, self._epoch.run)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As a supervisor ends."""
        await self.wardens.close()
        await asyncio.to_thread(self.launcher.close)
        release(self._epoch, "done 1")

    def start(self, name: str, command: Sequence[str], node: str) -> Any:
        """Start a process on a node."""
        return self.wardens.start(ProcessSpecification(name, "test", command, node=node), self._epoch.run / name)

    async def start_orphans(self) -> None:
        """On every node a process, one more of its session, and one of another."""
        signs = []
        for number, name in enumerate(self.wardens.nodes):
            signs.append(self._epoch.run / f"up-{number}")
            self.start(f"orphans-{number}", ["sh", "-c", ORPHANS.format(up=signs[-1])], name)
        await self._suite._until(lambda: all(sign.exists() for sign in signs), "no process could be started")

    def left(self) -> list[int]:
        """Processes of the run on any node."""
        return processes_with("AREAL_TOKEN", self._credentials.token)
