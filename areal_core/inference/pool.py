"""The servers of a fleet, and the log of their transitions."""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from areal_core.disk import append_events
from areal_core.inference.server import TRANSITIONS, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.errors import RunError
    from areal_core.inference.server import InferenceServer

LOGGED = (State.READY, State.LOST, State.REFUSED, State.GONE)
"""States that are logged for servers that the run did not start. The driver logs those of the run's own."""


class ServerPool:
    """The servers of a fleet.

    Args:
        log: file that receives the transitions, a JSON line each.

    Attributes:
        servers: the servers by name, without those that are GONE.
        reasons: why a server is not ready, by name.
        run_id: this run's prefix in the labels of its weights.
        vocabulary: number of the model's token ids.
        failure: why no server will ever be ready again; None while one may be.
        on_change: called when a server may have become ready, and when the fleet has failed.
        on_lost: called with a server that is lost.
        log: writes a line to the run's log, about servers that the run did not start.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.reasons: dict[str, str] = {}
        self.servers: dict[str, InferenceServer] = {}
        self.run_id = f"{secrets.token_hex(4)}-"
        self.vocabulary = 1 << 31
        self.failure: RunError | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[InferenceServer], None] = lambda _: None
        self.log: Callable[[str], None] = lambda _: None

    @property
    def ready(self) -> list[InferenceServer]:
        """The servers that may get requests."""
        return self.in_state(State.READY)

    @property
    def possible(self) -> int:
        """Number of servers that are ready or may become so.

        A refused server that has served may come back until the driver gives it up. A server that waits for room is
        counted out if another was refused without ever serving: it would fare no better.
        """
        refused = self.in_state(State.REFUSED)
        recoverable = [server for server in refused if server.has_served and not server.is_given_up]
        waiting = () if all(server.has_served for server in refused) else self.in_state(State.WAITING)
        hopeless = len(refused) - len(recoverable) + len(waiting)
        return len(self.servers) - hopeless

    def in_state(self, *states: State) -> list[InferenceServer]:
        """Return the servers in one of these states."""
        return [server for server in self.servers.values() if server.state in states]

    def move(self, server: InferenceServer, state: State, reason: str = "") -> None:
        """Move a server to another state, and log it. A transition that `TRANSITIONS` lacks is ignored."""
        if server.state is state or not _enter(server, state):
            return
        if reason:
            self.note(server, reason)
        elif state is State.READY:
            self.reasons.pop(server.name, None)
        self._record(server, reason=reason)
        line = f"{server.name} {state}{f': {reason}' if reason else ''}"
        sys.stderr.write(f"{line}\n")
        if not server.is_own and state in LOGGED:
            self.log(line)
        self.on_change()

    def note(self, server: InferenceServer, reason: str) -> None:
        """Keep the reason of a server's state for `explain` and the live view."""
        self.reasons[server.name] = f"{server.name} {server.state}: {reason}"

    def admit(self, server: InferenceServer) -> None:
        """Give requests to a server that holds the current weights."""
        server.has_served = server.was_ready = True
        server.retry_pause_s = 0.0
        server.doubted.clear()
        self.move(server, State.READY)

    def hold(self, *servers: InferenceServer) -> None:
        """Give no requests to servers while their weights change or their memory is freed. Not logged as `move` is."""
        for server in servers:
            _enter(server, State.UPDATING)
        self._record(*servers)

    def put_back(self, *servers: InferenceServer) -> None:
        """Give requests again to servers that were held."""
        for server in servers:
            _enter(server, State.READY)
        self._record(*servers)
        self.on_change()

    def lose(self, server: InferenceServer, reason: str, state: State = State.LOST) -> None:
        """Take a server out. Its requests continue elsewhere; it is synced before it is used again."""
        self.move(server, state, reason)
        server.version, server.group = -1, None
        server.doubted.set()
        self.on_lost(server)
        server.connection.close()

    def fail(self, failure: RunError) -> None:
        """Fail all requests: no server will ever be ready again."""
        self.failure = failure
        self.on_change()

    def explain(self) -> str:
        """Return why servers are not ready, a line for each."""
        return "\n".join(self.reasons.values()) or f"still starting; their logs are in {self._log.parent}"

    def describe(self) -> str:
        """Return how many servers are in which state, and how many requests they have."""
        states = Counter(str(server.state) for server in self.servers.values())
        requests = sum(server.requests for server in self.servers.values())
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        missing = [
            server.name
            for server in self.servers.values()
            if not server.is_own and server.state not in (State.READY, State.UPDATING)
        ]
        reasons = [self.reasons[name] for name in missing if name in self.reasons]
        return "; ".join([counts, f"{requests} requests", *reasons])

    def _record(self, *servers: InferenceServer, reason: str = "") -> None:
        extra = {"reason": reason} if reason else {}
        now = time.time()
        events = (
            {"time": now, "server": server.name, "state": str(server.state), "version": server.version, **extra}
            for server in servers
        )
        append_events(self._log, *events)


def _enter(server: InferenceServer, state: State) -> bool:
    """Set the state if the transition exists, and return whether it does."""
    if state is not server.state and state not in TRANSITIONS[server.state]:
        return False
    server.state = state
    return True
