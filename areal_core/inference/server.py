"""One server of a fleet: its state, what it reported of itself, and the calls that change its weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from areal_core.inference.errors import UpdateRefusedError, known_form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_core.inference.adapter import ServerAdapter, ServerIdentity, WeightGroup
    from areal_core.interfaces.inference import UpdateMode, WeightUpdate

ABORT_INTERVAL_S = 0.02
"""Seconds between two calls that abort the requests of a server, until it has none."""
IDLE_POLL_S = 0.002
JOIN_TIMEOUT_S = 30.0
"""Seconds without a ping of `areal serve` after which a LOST server that has joined counts as GONE."""


class State(StrEnum):
    """The state of a server. Only a READY server gets requests. `Lifecycle` documents the transitions."""

    WAITING = "waiting for room"
    STARTING = "starting"
    SYNCING = "syncing"
    READY = "ready"
    UPDATING = "updating"
    LEAVING = "leaving"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"


_ENDED = frozenset({State.LOST, State.REFUSED, State.WAITING})
TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.STARTING, State.REFUSED}),
        State.STARTING: _ENDED | {State.SYNCING, State.GONE},
        State.SYNCING: _ENDED | {State.READY, State.GONE},
        State.READY: _ENDED | {State.UPDATING, State.LEAVING},
        State.UPDATING: _ENDED | {State.READY, State.LEAVING},
        State.LEAVING: frozenset({State.GONE}),
        State.LOST: frozenset({State.STARTING, State.REFUSED, State.WAITING, State.GONE}),
        State.REFUSED: frozenset({State.STARTING, State.GONE}),
        State.GONE: frozenset(),
    }
)
"""For each state those that may follow. The pool ignores every other transition."""


@dataclass(eq=False)
class InferenceServer:
    """One server.

    Attributes:
        name: its name in logs and in the live view.
        adapter: speaks its protocol.
        connection: the connection to it, of the adapter's own class (`Connection`).
        mode: what becomes of the keys and values of live requests at an update.
        run_id: prefix of the versions in the server's labels, so that the labels of another run are not accepted.
        is_given_up: whether the run's driver no longer restarts it.
        is_own: whether the run starts it. Then its address is empty while no process of it serves.
        gpus: the GPUs of one of the run's own servers, as in `placement`, in the order of its ranks. Empty if the
            placement names none.
        state: its state.
        identity: what it reported of itself, None before.
        version: version of its weights. 0 for a process that was just started, -1 if unknown.
        requests: number of requests in progress.
        unresumable: number of these that would begin from their prompt on another server.
        drain_timeout_s: seconds for which an update waits for the unresumable requests before it ends them.
        group: the broadcast group that it is in.
        read_version: the version whose tensors it has all read from GPU memory.
        has_served: whether it, or a process before it, was ever ready. If so, a failure is not the config's fault.
        was_ready: whether it was ready since it was last STARTING.
        retry_pause_s: the last pause before it was tried again; 0 after a success.
        sync_lock: held while it gets weights and answers its first request, or frees its memory.
        has_memory: False from the time it freed its GPU memory until the next update.
        pinged_at: event-loop time of the last ping of its `areal serve`; None if it did not join this way.
        doubted: set when the server should be checked. Until the check it gets no requests.
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
    unresumable: int = 0
    drain_timeout_s: float = 0.0
    group: WeightGroup | None = None
    read_version: int = -1
    has_served: bool = False
    was_ready: bool = False
    retry_pause_s: float = 0.0
    sync_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_memory: bool = True
    pinged_at: float | None = None
    doubted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reports_spans(self) -> bool:
        """Whether the server labels tokens itself."""
        return self.identity is not None and self.identity.reports_spans

    @property
    def is_abandoned(self) -> bool:
        """Whether the `areal serve` that started it no longer sends pings."""
        return self.pinged_at is not None and asyncio.get_running_loop().time() - self.pinged_at > JOIN_TIMEOUT_S

    def label(self, version: int) -> str:
        """Return the server's label for weights of a version."""
        return f"{self.run_id}{version}"

    async def update(self, update: WeightUpdate) -> dict[str, float]:
        """Change the weights under the requests in progress.

        Returns:
            Seconds to pause, to transfer and to resume.

        Raises:
            ServerLostError, UpdateRefusedError: it is not certain that the server holds the new weights.
        """
        now = asyncio.get_running_loop().time
        began = now()
        if self.reports_spans:
            await self.adapter.stop(self.connection, self.mode)
        else:  # a request in progress would mix tokens of both versions without labels
            await self._end_requests()
        paused = now()
        await self.wake_up()
        await self._take_over(update)
        transferred = now()
        if self.reports_spans:
            await self.adapter.resume(self.connection)
        self.version = update.version
        return {"pause_s": paused - began, "transfer_s": transferred - paused, "resume_s": now() - transferred}

    async def sync(self, update: WeightUpdate) -> None:
        """Load weights while the server has no slot; whatever it was doing before is ended. Raises as `update`."""
        assert update.path is not None
        await self.wake_up()
        await self.adapter.resume(self.connection)  # an update that broke off may have left it paused
        await self._end_requests()
        await self.adapter.stop(self.connection, "recompute")
        with known_form():
            await self.adapter.load(self.connection, update.path, self.label(update.version), "recompute")
        await self.adapter.resume(self.connection)
        self.version = update.version

    async def sleep(self) -> None:
        """End the requests, which keep their tokens, and free the GPU memory until the next update."""
        if self.has_memory:
            await self._end_requests()
            await self.adapter.sleep(self.connection)
            self.has_memory = False

    async def wake_up(self) -> None:
        """Allocate the GPU memory again if it was freed."""
        if not self.has_memory:
            await self.adapter.wake_up(self.connection)
            self.has_memory = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return whether its requests have ended within so many seconds."""
        return await self._wait(lambda: not self.requests, timeout_s)

    async def _end_requests(self) -> None:
        """Abort all requests, also those of workers that have died, until no slot is leased.

        Wait for the unresumable ones first: if each update ended them, they would never be complete.
        """
        await self._wait(lambda: not self.unresumable, self.drain_timeout_s)
        await self.adapter.abort(self.connection)
        while not await self.wait_idle(ABORT_INTERVAL_S):
            await self.adapter.abort(self.connection)

    async def _take_over(self, update: WeightUpdate) -> None:
        label = self.label(update.version)
        with known_form():
            if update.path is not None:
                await self.adapter.load(self.connection, update.path, label, self.mode)
            elif self.group is not None:
                await self.adapter.receive(self.connection, self.group, update.tensors, label, self.mode)
            elif self.read_version != update.version:
                raise UpdateRefusedError("is not in the group in which the weights are broadcast")

    @staticmethod
    async def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(IDLE_POLL_S)
        return condition()
