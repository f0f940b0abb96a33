"""The servers of a fleet: what one is, does and holds, and which there are."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from areal_core.disk import append_events
from areal_core.servers.errors import UpdateRefusedError, known_form

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.errors import RunError
    from areal_core.interfaces import UpdateMode, WeightUpdate
    from areal_core.servers.interface import ServerAdapter, ServerIdentity, WeightGroup

ABORT_INTERVAL_S = 0.02
IDLE_POLL_S = 0.002
JOIN_TIMEOUT_S = 30.0
"""A server that joined has gone when it is lost and its program, which speaks every second, is silent for so long."""


class State(StrEnum):
    """Where a server is in its life. Only a ready one is given requests."""

    WAITING = "waiting for room"
    STARTING = "starting"
    SYNCING = "syncing"
    READY = "ready"
    UPDATING = "updating"
    LEAVING = "leaving"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"


TOLD = (State.READY, State.LOST, State.REFUSED, State.GONE)
"""On the terminal, of servers that others have started; of the run's own the driver tells."""


@dataclass(eq=False)
class Member:
    """One server.

    Attributes:
        name: in logs and the live view.
        adapter: speaks its language.
        connection: to it, of the adapter's own class (`Connection`).
        mode: what becomes of live requests' keys and values at an update.
        run_id: of the run, in front of each version in the server's labels, so that no other run's are believed.
        is_given_up: whether the driver of the run starts it no more.
        is_own: whether the run starts it itself. Its address is empty while no process of it serves.
        gpus: of one of the run's own, by their numbers in `placement`, in the order of its ranks; empty where the run
            names none.
        state: where it is in its life.
        identity: what it said of itself, None before.
        version: of its weights; 0 of a process that was just started, -1 while that is not known.
        requests: under way there.
        uninterrupted: of these, how many would begin anew elsewhere.
        patience_s: for which these are waited for before they are ended.
        group: the broadcast group that it is in.
        has_read: the version whose weights it has read by itself, every tensor of them.
        has_served: whether it, or a process before it, was ready ever: what fails then is no fault of the config.
        being_synced: held while it is given weights and tried out, or gives its memory away.
        has_memory: False after it gave its GPU's memory away, until the next update.
        asked_at: when its program last asked that it be used; None where it did not join.
        doubted: set when something happened that whoever watches it should look at; until then it is given no requests.
    """

    name: str
    adapter: ServerAdapter
    connection: Any
    mode: UpdateMode
    run_id: str = ""
    is_given_up: bool = False
    is_own: bool = False
    gpus: tuple[int, ...] = ()
    state: State = State.STARTING
    identity: ServerIdentity | None = None
    version: int = -1
    requests: int = 0
    uninterrupted: int = 0
    patience_s: float = 0.0
    group: WeightGroup | None = None
    has_read: int = -1
    has_served: bool = False
    being_synced: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_memory: bool = True
    asked_at: float | None = None
    doubted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reports_spans(self) -> bool:
        """Whether the server labels tokens itself."""
        return self.identity is not None and self.identity.reports_spans

    @property
    def is_lost(self) -> bool:
        """Whether the program that brought it into the run is not heard any more."""
        return self.asked_at is not None and asyncio.get_running_loop().time() - self.asked_at > JOIN_TIMEOUT_S

    def label(self, version: int) -> str:
        """How the server names weights of a version."""
        return f"{self.run_id}{version}"

    async def update(self, update: WeightUpdate) -> dict[str, float]:
        """Change the weights under the requests that it works on.

        Returns:
            Seconds to stop, to transfer and to resume.

        Raises:
            ServerLostError, UpdateRefusedError: it does not hold the new weights for sure.
        """
        now = asyncio.get_running_loop().time
        began = now()
        if self.reports_spans:
            await self.adapter.stop(self.connection, self.mode)
        else:  # no partial generation may be under way when weights change, for its tokens could not be told apart
            await self._end_requests()
        stopped = now()
        await self.wake_up()
        await self._take_over(update)
        transferred = now()
        if self.reports_spans:
            await self.adapter.resume(self.connection)
        self.version = update.version
        ended = now()
        return {"pause_s": stopped - began, "transfer_s": transferred - stopped, "resume_s": ended - transferred}

    async def sync(self, update: WeightUpdate) -> None:
        """Take over weights while nothing is asked of it; whatever it was doing before is ended. Raises as `update`."""
        assert update.path is not None
        await self.wake_up()
        await self.adapter.resume(self.connection)  # an update that broke off may have left it stopped
        await self._end_requests()
        await self.adapter.stop(self.connection, "recompute")
        with known_form():
            await self.adapter.load(self.connection, update.path, self.label(update.version), "recompute")
        await self.adapter.resume(self.connection)
        self.version = update.version

    async def sleep(self) -> None:
        """End its requests, which keep their tokens, and let it give its memory away until the next update."""
        if self.has_memory:
            await self._end_requests()
            await self.adapter.sleep(self.connection)
            self.has_memory = False

    async def _end_requests(self) -> None:
        """End what runs there, that of workers that are gone included, until no slot of it is out.

        What would begin anew elsewhere is waited for, for a while: with every update it would do so for ever.
        """
        await self._wait(lambda: not self.uninterrupted, self.patience_s)
        await self.adapter.abort(self.connection)
        while not await self.wait_idle(ABORT_INTERVAL_S):
            await self.adapter.abort(self.connection)

    async def wake_up(self) -> None:
        """Let it take its memory again where it gave it away."""
        if not self.has_memory:
            await self.adapter.wake_up(self.connection)
            self.has_memory = True

    async def _take_over(self, update: WeightUpdate) -> None:
        label = self.label(update.version)
        with known_form():
            if update.path is not None:
                await self.adapter.load(self.connection, update.path, label, self.mode)
            elif self.group is not None:
                await self.adapter.receive(self.connection, self.group, update.tensors, label, self.mode)
            elif self.has_read != update.version:
                raise UpdateRefusedError("is not in the group in which the weights are broadcast")

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether its requests have ended within so many seconds."""
        return await self._wait(lambda: not self.requests, timeout_s)

    @staticmethod
    async def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(IDLE_POLL_S)
        return condition()


class ServerPool:
    """The servers of a fleet.

    Args:
        log: file for the transitions, a JSON line each.

    Attributes:
        members: by name.
        reasons: why those are not ready that are not, by name.
        run_id: of this run, in the labels of its weights.
        vocabulary: how many token ids the model has.
        failure: why no server will ever be ready again; None while one may be.
        on_change: called when a server may have become ready, and when the fleet has failed.
        on_lost: called with a server that is lost.
        log: takes a line for whoever watches the run, of servers that others have started.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.reasons: dict[str, str] = {}
        self.members: dict[str, Member] = {}
        self.run_id = f"{secrets.token_hex(4)}-"
        self.vocabulary = 1 << 31
        self.failure: RunError | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Member], None] = lambda _: None
        self.log: Callable[[str], None] = lambda _: None

    @property
    def ready(self) -> list[Member]:
        """The servers that may be given requests."""
        return self.those(State.READY)

    @property
    def possible(self) -> int:
        """How many servers are ready or may become so; one that has served is given more than one chance, until the
        driver starts it no more."""
        refused = self.those(State.REFUSED)
        may_serve = [member for member in refused if member.has_served and not member.is_given_up]
        # What one of them cannot do, none can that has not begun.
        waiting = () if all(member.has_served for member in refused) else self.those(State.WAITING)
        hopeless = len(refused) - len(may_serve) + len(waiting)
        return len(self.members) - hopeless - len(self.those(State.GONE))

    def those(self, *states: State) -> list[Member]:
        """The servers in one of these states."""
        return [member for member in self.members.values() if member.state in states]

    def move(self, member: Member, state: State, reason: str = "") -> None:
        """A server enters another state; told once."""
        if member.state is state:
            return
        member.state = state
        if reason:
            self.note(member, reason)
        elif state is State.READY:
            self.reasons.pop(member.name, None)
        self._record(member, reason=reason)
        line = f"{member.name} {state}{f': {reason}' if reason else ''}"
        sys.stderr.write(f"{line}\n")
        if not member.is_own and state in TOLD:
            self.log(line)
        self.on_change()

    def _record(self, *members: Member, reason: str = "") -> None:
        also = {"reason": reason} if reason else {}
        now = time.time()
        events = (
            {"time": now, "server": member.name, "state": str(member.state), "version": member.version, **also}
            for member in members
        )
        append_events(self._log, *events)

    def note(self, member: Member, reason: str) -> None:
        """Why a server is in its state, for whoever asks."""
        self.reasons[member.name] = f"{member.name} {member.state}: {reason}"

    def admit(self, member: Member) -> None:
        """A server holds the current weights and may be given requests."""
        member.has_served = True
        member.doubted.clear()
        self.move(member, State.READY)

    def hold(self, *members: Member) -> None:
        """Nothing is asked of servers while their weights change or their memory is away; the terminal says nothing."""
        for member in members:
            member.state = State.UPDATING
        self._record(*members)

    def put_back(self, *members: Member) -> None:
        """Servers that were held may be given requests again."""
        for member in members:
            member.state = State.READY
        self._record(*members)
        self.on_change()

    def lose(self, member: Member, reason: str, state: State = State.LOST) -> None:
        """Take a server out; what it works on goes on elsewhere. It must catch up before it is used again."""
        if member.state not in (State.GONE, State.REFUSED):
            self.move(member, state, reason)
        member.version, member.group = -1, None
        member.doubted.set()
        self.on_lost(member)
        member.connection.close()

    def fail(self, failure: RunError) -> None:
        """No server will ever be ready again."""
        self.failure = failure
        self.on_change()

    def explain(self) -> str:
        """Why servers are not ready, a line for each."""
        return "\n".join(self.reasons.values()) or f"still starting; their logs are in {self._log.parent}"

    def describe(self) -> str:
        """How many servers are in which state, and what they have to do."""
        states = Counter(str(member.state) for member in self.members.values())
        requests = sum(member.requests for member in self.members.values())
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        missed = [
            m.name for m in self.members.values() if not m.is_own and m.state not in (State.READY, State.UPDATING)
        ]
        told = [self.reasons[name] for name in missed if name in self.reasons]
        return "; ".join([counted, f"{requests} requests", *told])
