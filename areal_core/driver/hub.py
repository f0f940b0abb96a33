"""Where all processes of a run are known: each holds one connection, which is discovery, liveness and stop signal.

A closed connection is a death, for a guard closes it only when nothing of its member is left. The hub hangs up on whom
the driver wants to end; the guard at the other end does the rest.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.launcher import EndMeans, Place, ProcessEnd, ProcessGroup
from areal_core.launchers.guard import last_words
from areal_core.messages import Done, Failed, Peer, PeerClosed, serve
from areal_core.messages.hub import (
    Announce,
    Ask,
    Beat,
    Ended,
    Heard,
    Join,
    NodeReady,
    Server,
    Servers,
    Stop,
    Watch,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from areal_core.messages import Credentials

Key = tuple[str, int]
HANG_UP_S = 5.0
"""For a guard to end its member once the hub has hung up; then the connection is given up."""


@dataclass(eq=False)
class Process:
    """A member of a process group, from its start to its end.

    Attributes:
        group, index: which it is.
        place: where it was started.
        attempt: in which it was started.
        environment: that it is told when it joins.
        log: what it writes.
        join: how it came; None before.
        peer: its connection; None before it has come.
        beat: what it is doing.
        heard: when something was heard of it.
        served: addresses by what is served there.
        is_ready: whether it has ever said so, by announcing something.
        has_finished: whether it has said that all its work is done.
        code: exit code, as its guard has told it.
        why: why the hub has hung up; empty where it has not.
        stopping: whether its end is wanted: nothing follows from it.
        ended: how it has ended.
    """

    group: ProcessGroup
    index: int
    place: Place
    attempt: int
    environment: Mapping[str, str]
    log: Path
    join: Join | None = None
    peer: Peer | None = None
    beat: Beat = field(default_factory=lambda: Beat("starting", 0.0, 0.0, 0.0))
    heard: float = field(default_factory=time.monotonic)
    served: dict[str, str] = field(default_factory=dict)
    is_ready: bool = False
    has_finished: bool = False
    code: int | None = None
    why: str = ""
    stopping: bool = False
    ended: asyncio.Future[ProcessEnd] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def name(self) -> str:
        """Unlike any other's in the run."""
        return self.group.member(self.index)

    @property
    def key(self) -> Key:
        """Group and index."""
        return self.group.name, self.index

    @property
    def is_essential(self) -> bool:
        """Whether its end is the end of the attempt."""
        return self.group.end is EndMeans.ENDS_ATTEMPT

    @property
    def silent_s(self) -> float:
        """Seconds since it was heard; 0 before it has come and after it has ended."""
        return 0.0 if self.join is None or self.ended.done() else time.monotonic() - self.heard

    def notify(self, message: Any, number: int = 0) -> None:
        """Tell it something; nothing happens where it does not listen, or not any more."""
        if self.peer is not None:
            with suppress(PeerClosed):
                self.peer.notify(message, number)

    def stop(self) -> None:
        """Ask it to finish in order, also where it is yet to come."""
        self.stopping = True
        self.notify(Stop())

    def end(self, how: ProcessEnd) -> None:
        """Nothing is left of it."""
        if not self.ended.done():
            self.ended.set_result(how)


class Hub:
    """Serves the processes of a run.

    Args:
        credentials: of the run; those of a new attempt take their place.
        on_message: called with what a process says that is not for the hub, and the number to answer it under.
        on_end: called with a process that has ended.
        on_node: serves the connection of a machine that offers itself; None where no launcher takes any.
        on_visitor: serves a connection of somebody else.

    Attributes:
        processes: that were started and have not ended, by group and index.
        failed: replaced members that are gone for good, each with the reason, by role and name.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        on_message: Callable[[Process, Any, int], None],
        on_end: Callable[[Process], None],
        on_node: Callable[[Peer, NodeReady, int], Awaitable[None]] | None,
        on_visitor: Callable[[Peer], Awaitable[None]],
    ) -> None:
        self.credentials = credentials
        self.processes: dict[Key, Process] = {}
        self.failed: dict[str, dict[str, str]] = {}
        self.address = ""
        self._on_message, self._on_end, self._on_node, self._on_visitor = on_message, on_end, on_node, on_visitor
        self._asking: list[tuple[Process, str, int]] = []
        self._watching: dict[Process, str] = {}

    def begin(self, credentials: Credentials) -> None:
        """Let in who shows these."""
        self.credentials = credentials
        self.failed.clear()

    async def listen(self, host: str) -> None:
        """Listen on a free port; `address` says which."""
        server = await serve(f"tcp:{host}:0", self._serve, lambda: self.credentials)
        self.address = server.address

    def hang_up(self, process: Process, why: str) -> None:
        """Have a member and all that it started end."""
        if process.peer is None or process.why:
            return
        process.why = why
        process.peer.end()
        asyncio.get_running_loop().call_later(HANG_UP_S, process.peer.abort)

    def notify_watchers(self, role: str) -> bool:
        """The members of a role that serve have changed; whether anybody watches them."""
        serving = tuple(
            Server(process.name, process.served[role], process.attempt == self.credentials.attempt)
            for process in self.processes.values()
            if role in process.served
        )
        for watcher, watched in self._watching.items():
            if watched == role:
                watcher.notify(Servers(serving, self.failed.get(role, {})))
        return role in self._watching.values()

    async def _serve(self, peer: Peer) -> None:
        if peer.name == "guard":
            await self._take_last_words(peer)
        elif peer.name == "node":
            ready, number = await peer.receive_request()
            if self._on_node is None or not isinstance(ready, NodeReady):
                peer.reply(number, Failed("this run takes no nodes"))
                return
            await self._on_node(peer, ready, number)
        elif peer.name == "member":
            await self._serve_member(peer)
        else:
            await self._on_visitor(peer)

    async def _take_last_words(self, peer: Peer) -> None:
        ended, number = await peer.receive_request()
        if isinstance(ended, Ended):
            process = self.processes.get((ended.group, ended.index))
            if process is not None and process.join is None:  # it never came to its hello
                self.remove(process, ProcessEnd(ended.code))
            elif process is not None and process.join is not None and process.join.pid == ended.pid:
                process.code = ended.code
        peer.reply(number, Done())

    async def _serve_member(self, peer: Peer) -> None:
        join, number = await peer.receive_request()
        process = self.processes.get((join.group, join.index)) if isinstance(join, Join) else None
        refusal = ""
        if process is None or process.join is not None:
            refusal = "this process is not expected, or has joined already"
        elif not join.sees_run:
            refusal = "its machine does not see the run folder, or sees another one under this name"
            process.why = f"{join.host}: {refusal}"
            self.remove(process, ProcessEnd(None))
        if process is None or refusal:
            peer.reply(number, Failed(refusal))
            return
        process.join, process.peer, process.heard = join, peer, time.monotonic()
        peer.reply(number, Welcome(process.environment))
        if process.stopping:
            process.notify(Stop())
        try:
            while True:
                self._take(process, *await peer.receive_request())
        finally:
            self.remove(process, ProcessEnd(process.code))

    def remove(self, process: Process, how: ProcessEnd) -> None:
        """A process has ended, or never came."""
        if self.processes.get(process.key) is not process:
            return
        del self.processes[process.key]
        self._watching.pop(process, None)
        self._asking = [one for one in self._asking if one[0] is not process]
        process.end(ProcessEnd(how.code, how.last_words or last_words(process.log)))
        self._on_end(process)
        for role in process.served:
            self.notify_watchers(role)

    def _take(self, process: Process, message: Any, number: int) -> None:
        process.heard = time.monotonic()
        match message:
            case Beat():
                process.beat = message
                process.notify(Heard())
            case Announce(name, address):
                process.served[name], process.is_ready = address, True
                waiting, self._asking = self._asking, []
                for asker, wanted, asked in waiting:
                    self._find(asker, wanted, asked)
                self.notify_watchers(name)
            case Ask(name):
                self._find(process, name, number)
            case Watch(role):
                self._watching[process] = role
                self.notify_watchers(role)
            case _:
                self._on_message(process, message, number)

    def _find(self, asker: Process, name: str, number: int) -> None:
        """Answer who serves something, once somebody does."""
        found = [process.served[name] for process in self.processes.values() if name in process.served]
        if found:
            asker.notify(Announce(name, found[0]), -number)
        else:
            self._asking.append((asker, name, number))
