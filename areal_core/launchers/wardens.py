"""The supervisor's end of the wardens: which nodes there are, what runs on them, and how each process fares."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.messages import Channel, ChannelClosed, FrameDecoder, encode_frame, serve
from areal_core.messages.processes import (
    Alive,
    Beat,
    EndProcess,
    NodeNotice,
    NodeReady,
    ProcessEnded,
    SignalProcess,
    StartProcess,
    Tell,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from areal_core.interfaces.launcher import Launcher, ProcessSpecification
    from areal_core.messages import Credentials, Server

BEAT_S = 1.0
LEASE_S = 60.0
"""Silence of the supervisor after which a warden ends everything, and of a node after which it counts as lost."""
START_TIMEOUT_S = 120.0
LOST_CODE = -100
"""In place of an exit code: the node, or the way to it, is gone."""


class Node:
    """A node that a warden has come from."""

    def __init__(self, channel: Channel, ready: NodeReady) -> None:
        self.channel = channel
        self.ready = ready
        self.heard = time.monotonic()

    def post(self, message: Any) -> None:
        """Tell the warden; nothing happens where the node is gone."""
        with suppress(ChannelClosed):
            self.channel.post(message)


class SupervisedProcess:
    """A process of the run; a `RunningProcess`.

    Attributes:
        specification: what it is.
        node: where it runs.
        phase: what it says that it is doing, and for how long.
        heard: when it said something, of those that speak.
    """

    def __init__(self, specification: ProcessSpecification, node: Node, owner: str) -> None:
        self.specification = specification
        self.name = specification.name
        self.node = node
        self.owner = owner
        self.phase = Alive("starting", 0.0)
        self.heard = time.monotonic()
        self.decoder = FrameDecoder()
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        """See `RunningProcess.address`."""
        return self.node.ready.address

    @property
    def silent_s(self) -> float:
        """Seconds since a process that speaks was heard; 0 for others and for those that have ended."""
        return time.monotonic() - self.heard if self.specification.speaks and not self.ended.done() else 0.0

    async def wait(self) -> ProcessEnd:
        """See `RunningProcess.wait`."""
        return await asyncio.shield(self.ended)

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        """See `RunningProcess.end`."""
        self.node.post(EndProcess(self.name, grace_s))
        return await self.wait()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.node.post(SignalProcess(self.name, int(number)))

    def tell(self, message: Any, number: int = 0) -> None:
        """Say something to a process that listens; nothing happens where it has ended."""
        if not self.ended.done():
            self.node.post(Tell(self.name, b"".join(encode_frame(message, number))))


class Wardens:
    """Listens for wardens, tells them what to run, and hears what becomes of it.

    Args:
        credentials: of the run.
        on_message: called with what a process says, and the number under which it waits for a reply.
        on_end: called with a process that has ended.
        on_visitor: serves a connection of somebody who is no warden.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        on_message: Callable[[SupervisedProcess, Any, int], None],
        on_end: Callable[[SupervisedProcess, ProcessEnd], None],
        on_notice: Callable[[Node, int], None],
        on_visitor: Callable[[Channel], Awaitable[None]],
    ) -> None:
        self._credentials = credentials
        self._on_message = on_message
        self._on_end = on_end
        self._on_notice = on_notice
        self._on_visitor = on_visitor
        self._server: Server | None = None
        self.nodes: list[Node] = []
        self.processes: dict[str, SupervisedProcess] = {}

    async def listen(self, host: str) -> str:
        """Listen on a free port; the address."""
        self._server = await serve(f"tcp:{host}:0", self._serve, self._credentials)
        start_task(self._beat(), "beats for the wardens")
        return self._server.address

    async def bring(self, launcher: Launcher) -> None:
        """Have the launcher bring its wardens, and wait until all have come.

        Raises:
            RunError: one did not come; says why.
        """
        assert self._server is not None
        command = [sys.executable, "-m", "areal_core.launchers.warden", self._server.address, str(LEASE_S)]
        count = await asyncio.to_thread(launcher.bring, command, self._credentials.as_environment())
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.nodes) < count:
            for node, reason in launcher.lost().items():
                raise RunError(f"no process can be started on {node}: {reason}")
            if time.monotonic() > deadline:
                raise RunError(f"{len(self.nodes)} of {count} nodes have reported within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)

    def start(self, specification: ProcessSpecification, log: Path, owner: str = "") -> SupervisedProcess:
        """Start a process on the node that it needs; returns at once.

        Args:
            specification: of the process.
            log: file for its output.
            owner: name of the process that asked for it.

        Raises:
            RunError: there is no such node.
        """
        beside = self.processes.get(specification.beside)
        if not self.nodes or (specification.beside and beside is None):
            raise RunError(f"there is no node for the process {specification.name}")
        node = beside.node if beside is not None else self.nodes[0]
        process = self.processes[specification.name] = SupervisedProcess(specification, node, owner)
        needs, environment = specification.needs, dict(specification.environment)
        if needs.cores:
            environment.setdefault("OMP_NUM_THREADS", str(needs.cores))
        command, speaks = tuple(specification.command), specification.speaks
        node.post(StartProcess(process.name, command, environment, str(log), needs.gpus, speaks))
        return process

    async def close(self) -> None:
        """Let go of all nodes: their wardens end everything."""
        if self._server is not None:
            self._server.close()
        for node in list(self.nodes):
            await node.channel.close()

    async def _serve(self, channel: Channel) -> None:
        if channel.peer != "warden":
            await self._on_visitor(channel)
            return
        ready = await channel.receive()
        node = Node(channel, ready)
        self.nodes.append(node)
        try:
            while True:
                self._hear(node, await channel.receive())
        finally:
            self.nodes.remove(node)
            self._lose(node)

    def _hear(self, node: Node, message: Any) -> None:
        node.heard = time.monotonic()
        process = self.processes.get(getattr(message, "name", ""))
        match message:
            case ProcessEnded(_, code, last_words) if process is not None:
                self._has_ended(process, ProcessEnd(code, last_words))
            case Tell(_, frames) if process is not None:
                process.heard = node.heard
                for said, number, _ in process.decoder.feed(frames):
                    if isinstance(said, Alive):
                        process.phase = said
                    else:
                        self._on_message(process, said, number)
            case NodeNotice(number):
                self._on_notice(node, number)

    def _lose(self, node: Node) -> None:
        """The way to a node is broken: whatever ran there has ended, or will within the lease."""
        for process in list(self.processes.values()):
            if process.node is node and not process.ended.done():
                self._has_ended(process, ProcessEnd(LOST_CODE, f"the node {node.ready.host} was lost"))

    def _has_ended(self, process: SupervisedProcess, end: ProcessEnd) -> None:
        if not process.ended.done():
            process.ended.set_result(end)
            self._on_end(process, end)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for node in list(self.nodes):
                node.post(Beat())
                if time.monotonic() - node.heard > LEASE_S:
                    await node.channel.close()  # it is lost, and its warden must not come back
