"""The driver's hub: every process of a run holds one connection to it, which is discovery, liveness and stop signal.

A guard closes the connection of its member only when nothing of the member is left. To terminate a process, the hub
closes its side, and the guard at the other end kills the process tree. If that takes longer than
`TERMINATION_TIMEOUT_S`, for example because a process hangs in a device driver, the hub stops waiting: it records the
process as lost, although something of it may still be left.

    connection of     what the hub does with it
    ----------------  ------------------------------------------------------------------
    a member          `_serve_member`: its `Join`, then its messages until it is closed
    a guard           `_receive_exit_code`: how its member ended
    a node            `on_node`: the launcher places members there
    a client          `on_client`: `areal status`, `areal stop` and others that know the run folder
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_core.interfaces.launcher import OnExit, Place, ProcessEnd, ProcessGroup
from areal_core.runtime.logs import last_words
from areal_core.runtime.messages import (
    Announce,
    ExitReport,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Lookup,
    RoleMembers,
    ServingMember,
    Stop,
    Watch,
)
from areal_core.runtime.rpc import Done, Failed, Peer, PeerClosed, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from areal_core.runtime.rpc import Credentials

Key = tuple[str, int]
TERMINATION_TIMEOUT_S = 15.0
"""Seconds for a guard to kill its member after the hub has closed its side. Then the process counts as lost."""


@dataclass(eq=False)
class Process:
    """A member of a process group, from its start to its end.

    Attributes:
        group: its process group.
        index: its number in the group.
        place: where it was started.
        attempt: number of the attempt in which it was started.
        environment: variables that it receives when it joins.
        log: the file with its output.
        start: number of its start, which its messages show.
        join: its first message; None until it has joined.
        peer: its connection; None until it has joined.
        beat: its last heartbeat, with its phase.
        heard_at: time of its last message, by `time.monotonic()`.
        served: addresses by the name of what it serves there.
        is_ready: whether it has ever announced an address.
        has_finished: whether it has reported that all its work is done.
        code: exit code that its guard has reported.
        end_reason: why the driver ended or refused it; empty if the driver did not.
        is_stopping: whether the run has asked it to stop, so that nothing follows from its end.
        ended: how it has ended.
    """

    group: ProcessGroup
    index: int
    place: Place
    attempt: int
    environment: Mapping[str, str]
    log: Path
    start: int = 0
    join: Join | None = None
    peer: Peer | None = None
    beat: Heartbeat = field(default_factory=lambda: Heartbeat("starting", 0.0, 0.0, 0.0))
    heard_at: float = field(default_factory=time.monotonic)
    served: dict[str, str] = field(default_factory=dict)
    is_ready: bool = False
    has_finished: bool = False
    code: int | None = None
    end_reason: str = ""
    is_stopping: bool = False
    ended: asyncio.Future[ProcessEnd] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def name(self) -> str:
        """Unique name in the run, such as `trainer-0`."""
        return self.group.member(self.index)

    @property
    def key(self) -> Key:
        """Group name and index."""
        return self.group.name, self.index

    @property
    def is_essential(self) -> bool:
        """Whether its end is the end of the attempt."""
        return self.group.on_exit is OnExit.END_ATTEMPT

    @property
    def silent_s(self) -> float:
        """Seconds since its last message; 0 before it has joined and after it has ended."""
        if self.join is None or self.ended.done():
            return 0.0
        return time.monotonic() - self.heard_at

    @property
    def log_hint(self) -> str:
        """A hint for errors: where its log is."""
        return f"its log: {self.log}"

    def notify(self, message: Any, number: int = 0) -> None:
        """Send it a message. Do nothing if it has not joined or its connection is closed."""
        if self.peer is not None:
            with suppress(PeerClosed):
                self.peer.notify(message, number)

    def stop(self) -> None:
        """Ask it to finish in order. A process that has not joined yet is asked when it joins."""
        self.is_stopping = True
        self.notify(Stop())


class Hub:
    """Serves the connections of a run's processes.

    Args:
        credentials: of the run and its attempt. `admit` replaces them.
        on_message: called with a process, a message that is not for the hub, and the number to answer it under.
        on_end: called with a process that has ended.
        on_node: serves the connection of a machine that joins the run; None if the launcher accepts none.
        on_client: serves the connection of a client.

    Attributes:
        processes: those that were started and have not ended, by group name and index.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        on_message: Callable[[Process, Any, int], None],
        on_end: Callable[[Process], None],
        on_node: Callable[[Peer], Awaitable[None]] | None,
        on_client: Callable[[Peer], Awaitable[None]],
    ) -> None:
        self.credentials = credentials
        self.processes: dict[Key, Process] = {}
        self.address = ""
        self._on_message = on_message
        self._on_end = on_end
        self._on_node = on_node
        self._on_client = on_client
        self._given_up: dict[str, dict[str, str]] = {}
        self._questions: list[_Question] = []
        self._watchers: dict[Process, set[str]] = {}

    async def listen(self, host: str) -> None:
        """Listen on a free port and set `address`."""
        server = await serve(f"tcp:{host}:0", self._serve, lambda: self.credentials)
        self.address = server.address

    def admit(self, credentials: Credentials) -> None:
        """Begin an attempt: from now on, only connections that show these credentials are accepted."""
        self.credentials = credentials
        self._given_up.clear()

    # Processes.

    def add(self, process: Process) -> None:
        """Expect a process that is about to be started."""
        self.processes[process.key] = process

    def discard(self, process: Process) -> None:
        """No longer expect a process, because its launcher failed to start it."""
        self.processes.pop(process.key, None)

    def terminate(self, process: Process, reason: str) -> None:
        """Have its guard kill a process and everything that the process has started.

        Do nothing if it has not joined yet or is being terminated already.
        """
        if process.peer is None or process.end_reason:
            return
        process.end_reason = reason
        process.peer.end()
        asyncio.get_running_loop().call_later(TERMINATION_TIMEOUT_S, process.peer.abort)

    def remove(self, process: Process, end: ProcessEnd) -> None:
        """Record that a process has ended or never joined. Do nothing if that is recorded already."""
        if self.processes.get(process.key) is not process:
            return
        del self.processes[process.key]
        self._watchers.pop(process, None)
        self._questions = [question for question in self._questions if question.process is not process]
        if not process.ended.done():
            process.ended.set_result(ProcessEnd(end.code, end.last_words or last_words(process.log)))
        self._on_end(process)
        for name in process.served:
            self._notify_watchers(name)

    def give_up(self, process: Process, reason: str) -> None:
        """Let the watchers of its role know that a process will not be started again in this attempt."""
        role = process.group.role
        self._given_up.setdefault(role, {})[process.name] = reason
        self._notify_watchers(role)

    def is_watched(self, role: str) -> bool:
        """Return whether a process watches the processes of a role."""
        return any(role in roles for roles in self._watchers.values())

    # Connections.

    async def _serve(self, peer: Peer) -> None:
        match peer.name:
            case "member":
                await self._serve_member(peer)
            case "guard":
                await self._receive_exit_code(peer)
            case "node":
                await self._serve_node(peer)
            case _:
                await self._on_client(peer)

    async def _serve_member(self, peer: Peer) -> None:
        join, number = await peer.receive_request()
        process = self.processes.get((join.group, join.index)) if isinstance(join, Join) else None
        if process is None or process.join is not None or process.start != join.start:
            peer.reply(number, Failed("this process is not expected, or has joined already"))
            return
        if not join.sees_run:
            refusal = "its machine does not see the run folder, or sees another one under this name"
            process.end_reason = f"{join.host}: {refusal}"
            self.remove(process, ProcessEnd(None))
            peer.reply(number, Failed(refusal))
            return
        process.join = join
        process.peer = peer
        process.heard_at = time.monotonic()
        peer.reply(number, Joined(process.environment))
        if process.is_stopping:
            process.notify(Stop())
        try:
            while True:
                self._receive(process, *await peer.receive_request())
        finally:
            self.remove(process, ProcessEnd(process.code))

    async def _receive_exit_code(self, peer: Peer) -> None:
        """Take the report of a guard. Its member's own connection closes afterwards, and ends the process here."""
        ended, number = await peer.receive_request()
        if isinstance(ended, ExitReport):
            process = self.processes.get((ended.group, ended.index))
            if process is not None and process.start == ended.start:
                process.code = ended.code
                if process.join is None:  # it has died before it could join
                    self.remove(process, ProcessEnd(ended.code))
        peer.reply(number, Done())

    async def _serve_node(self, peer: Peer) -> None:
        if self._on_node is None:
            peer.notify(Failed("the launcher of this run accepts no machines"))
        else:
            await self._on_node(peer)

    # Messages of members.

    def _receive(self, process: Process, message: Any, number: int) -> None:
        process.heard_at = time.monotonic()
        match message:
            case Heartbeat():
                process.beat = message
                process.notify(HeartbeatAck())
            case Announce(name, address):
                process.served[name] = address
                process.is_ready = True
                self._answer_questions()
                self._notify_watchers(name)
            case Lookup(name):
                self._questions.append(_Question(process, name, number))
                self._answer_questions()
            case Watch(role):
                self._watchers.setdefault(process, set()).add(role)
                self._notify_watchers(role)
            case _:
                self._on_message(process, message, number)

    def _answer_questions(self) -> None:
        """Answer each `Lookup` whose name a process serves by now; the others wait."""
        questions, self._questions = self._questions, []
        for question in questions:
            addresses = [p.served[question.name] for p in self.processes.values() if question.name in p.served]
            if addresses:
                question.process.notify(Announce(question.name, addresses[0]), -question.number)
            else:
                self._questions.append(question)

    def _notify_watchers(self, role: str) -> None:
        """Send the watchers of a role the addresses of its processes."""
        serving = tuple(
            ServingMember(process.name, process.served[role], process.attempt == self.credentials.attempt)
            for process in self.processes.values()
            if role in process.served
        )
        for watcher, roles in self._watchers.items():
            if role in roles:
                watcher.notify(RoleMembers(role, serving, self._given_up.get(role, {})))


class _Question(NamedTuple):
    """A `Lookup` that waits until a process serves something under its name.

    Attributes:
        process: asked.
        name: of what it needs.
        number: under which it is answered.
    """

    process: Process
    name: str
    number: int
