"""The lifecycle of a fleet's servers: a state machine of each server, and the weights that they must hold."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.background import start_task
from areal_core.disk import read_shapes
from areal_core.errors import RunError
from areal_core.inference import probe
from areal_core.inference.checks import check_fit, check_identity
from areal_core.inference.errors import (
    FAULTS,
    RequestRefusedError,
    ServerRefusedError,
    UpdateRefusedError,
    in_time,
    known_form,
)
from areal_core.inference.server import InferenceServer, State
from areal_core.interfaces.inference import ServerLostError, ServerUnreachableError, WeightUpdate
from areal_core.runtime.messages import ColocatedTraining, RestartMember

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from areal_core.inference.adapter import ServerAdapter
    from areal_core.inference.broadcast import BroadcastGroups
    from areal_core.inference.pool import ServerPool
    from areal_core.inference.settings import ServerSettings
    from areal_core.interfaces.inference import BroadcastGroup
    from areal_core.interfaces.model import ModelReference
    from areal_core.runtime.messages import RoleMembers, ServingMember

POLL_S, START_POLL_S, RESTART_POLL_S = 0.25, 0.05, 0.05
LOGGED_AFTER_S = 5.0
"""Seconds without an answer after which a server that the run did not start is logged."""
RETRY_PAUSES_S = {State.LOST: (1.0, 10.0), State.REFUSED: (30.0, 300.0)}
"""Seconds until a server is tried again: the first pause, which doubles, and the longest."""
RECOVERY_S = 30.0
"""Seconds in which a server of the run that was healthy before must be healthy again. Then it is restarted."""

_ELASTIC_HINT = (
    "give the run more nodes, lower servers.minimum, or raise start_timeout_s: the run ends after so many seconds with "
    "too few servers"
)
_OWN_HINT = "see RUN_DIR/logs/server-0.log; raise start_timeout_s if servers need longer to start"
_ADDRESSES_HINT = (
    "start them, or name others in inference_engine.addresses; with `servers` above 0 the run starts its own"
)


class DriverConnection(Protocol):
    """What starts the fleet's own servers: the run's driver (`Member`), or in other programs `LocalServers`."""

    def watch(self, role: str, changed: Callable[[RoleMembers], None]) -> None:
        """Call `changed`, in any thread, with the processes of a role that serve, now and after each change."""

    def notify(self, message: RestartMember | ColocatedTraining) -> None:
        """Send a message."""

    def request(
        self, message: ColocatedTraining, timeout_s: float | None, waiting_for: str
    ) -> Future[Any] | asyncio.Future[Any]:
        """Send a message that is answered; the future has the answer."""

    def log(self, line: str) -> None:
        """Write a line to the run's log."""


class Lifecycle:
    """Moves the servers of a fleet through their states, and gives them weights.

    Each server with an address has a task, `_run`, which calls one method per state until the state changes. `lose`
    stands for `ServerPool.lose`, which any method here calls when a call to a server fails.

    from                              | to       | event                                               | method
    ----------------------------------|----------|-----------------------------------------------------|------------
    STARTING                          | WAITING  | an elastic server, above the minimum, is added      | start
    WAITING, LOST, REFUSED            | STARTING | the driver reports the address of a new process     | _replace
    LOST, REFUSED                     | STARTING | a pause has passed, longer after each failure       | _retry
    STARTING                          | SYNCING  | it is healthy, and a server of the run's model      | _identify
    SYNCING                           | READY    | it holds the current weights, and answers           | _sync
    READY                             | UPDATING | an update begins, or it frees its memory            | hold
    UPDATING                          | READY    | it holds the new weights, or no server took them    | put_back
    READY, UPDATING                   | LEAVING  | its `areal serve` stops                             | leave
    STARTING, SYNCING, LOST, REFUSED  | GONE     | the same, and it has no requests                    | leave
    LEAVING                           | GONE     | its requests are complete, or drain_timeout_s over  | _drain
    LOST, REFUSED                     | GONE     | its `areal serve` no longer sends pings             | _retry
    STARTING, SYNCING, READY, UPDATING| LOST     | a call to it failed, or its process has ended       | lose
    STARTING, SYNCING, READY, UPDATING| WAITING  | the process of an elastic server has ended          | _replace
    LOST                              | WAITING  | the same                                            | _replace
    WAITING, STARTING, SYNCING, LOST  | REFUSED  | the run cannot use it, or the driver gave it up     | lose
    READY, UPDATING                   | REFUSED  | the same                                            | lose

    Weights change for all servers together. Three things decide what a server may do meanwhile:

    - `_changing`, a lock: held from `announce_update` to the end of `update_weights`, and by a server in SYNCING that
      was overtaken by an update. While an update holds it, no server is admitted.
    - `_generation_turn`, an event: cleared by `sleep` until the next update is over. In between the trainer uses the
      shared GPUs, and no server is started, synced or asked.
    - `_has_folder`, an event: set if the current weights are in a folder. A server in SYNCING waits for it after a
      broadcast.

    Args:
        adapter: speaks to the servers.
        pool: the servers.
        groups: forms the process groups of broadcasts.
        driver: starts the fleet's own servers.

    Attributes:
        timings: seconds of the last update, those of the slowest server.
    """

    def __init__(
        self,
        adapter: ServerAdapter,
        pool: ServerPool,
        groups: BroadcastGroups,
        driver: DriverConnection,
    ) -> None:
        self.timings: dict[str, float] = {}
        self._adapter = adapter
        self._settings: ServerSettings = adapter.settings
        self._pool = pool
        self._groups = groups
        self._driver = driver
        self._model: ModelReference | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_started = False
        # Weights.
        self._current = WeightUpdate(0, None)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._is_tied = False
        self._changing = asyncio.Lock()
        self._is_announced = False
        self._generation_turn = asyncio.Event()
        self._generation_turn.set()
        self._has_folder = asyncio.Event()
        self._is_folder_missed = False

    # Servers come and go.

    async def start(self, model: ModelReference, gpus: Sequence[int] | None, *, is_tied: bool) -> None:
        """Add the servers that the settings name, and return when enough of them are ready.

        Args:
            model: the model that they must serve; its folder holds the weights of version 0.
            gpus: the GPUs of the run's own servers; None if the placement names none.
            is_tied: whether the model's head is its embeddings.

        Raises:
            RunError: the model's folder holds no complete weights, or too few servers became ready.
        """
        self._model = model
        self._shapes, self._is_tied = read_shapes(Path(model.path)), is_tied
        self._set_current(WeightUpdate(0, Path(model.path)))
        required = self._settings.bounds.minimum - len(self._settings.elsewhere)
        for number, gpus_of_server in enumerate(self._settings.gpus_of_servers(gpus)):
            server = self._add(f"server-{number}", "", gpus_of_server)
            if self._settings.is_elastic and number >= required:
                self._pool.move(server, State.WAITING)
        for address in self._settings.elsewhere:
            self._run_task(self._add(address.split("//")[1], address))
        if self._settings.servers:
            loop = asyncio.get_running_loop()
            self._driver.watch("server", lambda servers: _call_in_loop(loop, self._on_driver_report, servers))
        self._tasks[""] = start_task(self._watch_fleet(), "watching the fleet of servers")
        while len(self._pool.ready) < self._settings.bounds.minimum:
            if self._pool.failure is not None:
                raise self._pool.failure
            await asyncio.sleep(START_POLL_S)
        self._has_started = True

    def join(self, name: str, address: str) -> None:
        """Add a server that `areal serve` has started, or note its ping if it is there.

        Raises:
            RunError: the fleet has not started, or the name or the address is another server's.
        """
        for server in self._pool.servers.values():
            if (server.name == name) != (server.connection.address == address):
                raise RunError(
                    f"the run has a server {server.name} at {server.connection.address} already",
                    hints=["each needs a name and an address of its own; choose another --name"],
                )
        if name not in self._pool.servers:
            self._run_task(self._add(name, address))
        self._pool.servers[name].pinged_at = asyncio.get_running_loop().time()

    def leave(self, name: str, address: str) -> None:
        """Give no further requests to a server whose `areal serve` stops. Nothing happens if it is unknown."""
        server = self._pool.servers.get(name)
        if server is None or server.is_own or server.connection.address != address:
            return
        if server.state is State.LEAVING:
            return
        if self.is_changing and (server.group is not None or server.state is State.UPDATING):
            return  # the update counts on it; `areal serve` asks again
        if server.state in (State.READY, State.UPDATING):
            self._pool.move(server, State.LEAVING)
            server.doubted.set()
        else:
            self._tasks[name].cancel()
            self._forget(server)

    async def close(self) -> None:
        """Stop all tasks and close all connections. Safe to call twice."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for server in self._pool.servers.values():
            server.connection.close()

    def _add(self, name: str, address: str, gpus: tuple[int, ...] = ()) -> InferenceServer:
        server = self._pool.servers[name] = InferenceServer(
            name,
            self._adapter,
            self._adapter.connect(address),
            self._settings.update_mode,
            self._pool.run_id,
            is_own=not address,
            gpus=gpus,
            drain_timeout_s=self._settings.drain_timeout_s,
        )
        return server

    def _run_task(self, server: InferenceServer) -> None:
        self._tasks[server.name] = start_task(self._run(server), f"the lifecycle of {server.name}")

    def _forget(self, server: InferenceServer, reason: str = "") -> None:
        """Keep nothing of a server that has left. It may join again under its name."""
        self._pool.move(server, State.GONE, reason)
        self._pool.on_lost(server)  # nothing else would end a request that it still has
        server.connection.close()
        del self._pool.servers[server.name], self._tasks[server.name]
        self._pool.reasons.pop(server.name, None)

    def _on_driver_report(self, servers: RoleMembers) -> None:
        """Follow which of the run's own servers have a process, and which the driver no longer restarts."""
        if self._pool.failure is not None:
            return
        processes = {process.name: process for process in servers.serving}
        for server in [server for server in self._pool.servers.values() if server.is_own]:
            process = processes.get(server.name)
            if server.connection.address != (process.address if process else ""):
                self._replace(server, process)
            reason = servers.failed.get(server.name)
            server.is_given_up = reason is not None
            if reason and server.state is not State.REFUSED:
                self._pool.lose(server, reason, State.REFUSED)

    def _replace(self, server: InferenceServer, process: ServingMember | None) -> None:
        """Give one of the run's own servers a new process, or none if its process has ended."""
        if task := self._tasks.pop(server.name, None):
            task.cancel()
        if server.connection.address:
            state = State.WAITING if self._settings.is_elastic else State.LOST
            self._pool.lose(server, "its process has ended", state)
        server.connection = self._adapter.connect(process.address if process else "")
        if process is not None:
            # A process that outlived the last attempt holds whatever that attempt gave it.
            server.version = 0 if process.is_fresh else -1
            server.has_memory = True
            server.retry_pause_s = 0.0
            self._pool.move(server, State.STARTING)
            self._run_task(server)

    # The states of one server.

    async def _run(self, server: InferenceServer) -> None:
        """Take a server through its states until it is gone, or the driver is to restart it."""
        failure = ""
        while server.state is not State.GONE:
            try:
                match server.state:
                    case State.STARTING:
                        await self._identify(server)
                    case State.SYNCING:
                        await self._sync(server)
                    case State.READY | State.UPDATING:
                        await self._watch(server)
                    case State.LEAVING:
                        await self._drain(server)
                    case _:
                        if not await self._retry(server, failure):
                            return
            except (ServerRefusedError, *FAULTS) as error:
                failure = str(error)
                state = State.REFUSED if isinstance(error, ServerRefusedError) else State.LOST
                self._pool.lose(server, failure, state)

    async def _identify(self, server: InferenceServer) -> None:
        """Wait until a server is healthy, and check what it is.

        Raises:
            ServerRefusedError: the run cannot use it.
            ServerLostError, RequestRefusedError: it did not answer.
        """
        assert self._model is not None
        server.was_ready = False
        await self._wait_until_healthy(server)
        with known_form():
            server.identity = await self._adapter.identify(server.connection)
        check_identity(server.identity, self._model)
        self._pool.move(server, State.SYNCING)

    async def _wait_until_healthy(self, server: InferenceServer) -> None:
        limit_s = RECOVERY_S if server.is_own else self._settings.start_timeout_s
        now = asyncio.get_running_loop().time
        began = now()
        is_logged = server.is_own
        while True:
            try:
                await self._adapter.check_health(server.connection, self._settings.health_timeout_s)
                return
            except (ServerLostError, RequestRefusedError) as error:
                self._pool.note(server, str(error))
                if not is_logged and now() > began + LOGGED_AFTER_S:
                    is_logged = True
                    self._pool.log(f"{server.name} does not answer yet, waiting for it: {error}")
                if now() > began + limit_s or server.is_abandoned:
                    raise ServerLostError(f"was not healthy within {limit_s:g} s; {error}") from None
                await asyncio.sleep(POLL_S)

    async def _sync(self, server: InferenceServer) -> None:
        """Give a server the current weights, check its first answer, and admit it.

        Updates of the other servers go on meanwhile. If one overtakes this server, the server takes the lock
        `_changing` for its next try and so delays the next update. Otherwise a server that loads for longer than the
        trainer trains would never be admitted.

        Raises:
            ServerLostError, UpdateRefusedError: it is not certain that the server holds the weights.
            ServerRefusedError: it cannot serve the model.
        """
        if server.version == 0:
            await self._adapter.set_label(server.connection, server.label(0))
        is_overtaken = False
        while server.state is State.SYNCING:
            if self._current.path is None:
                self._is_folder_missed = True
                await self._has_folder.wait()
            await self._generation_turn.wait()
            async with self._changing if is_overtaken else nullcontext(), server.sync_lock:
                current = self._current
                if current.path is None or not self._generation_turn.is_set():
                    continue
                try:
                    await self._check_recovered(server)
                    if server.version != current.version:
                        await in_time(server.sync(current), self._settings.update_timeout_s, "update_timeout_s")
                    await self._check_first_answer(server)
                except UpdateRefusedError:
                    if self._current is current:
                        raise  # else newer weights have replaced these
                if self._current is current and (is_overtaken or not self._changing.locked()):
                    self._pool.admit(server)
                    return
            is_overtaken = True

    async def _check_recovered(self, server: InferenceServer) -> None:
        """Check that a process of the last attempt still generates.

        Its GPU may wait for ever in a broadcast whose trainer was killed, while its front end answers. Only a restart
        helps then.
        """
        if not server.is_own or server.version >= 0 or not server.has_memory:
            return
        await in_time(self._adapter.resume(server.connection), RECOVERY_S)  # an update that broke off paused it
        await in_time(probe.ask(server, "revived"), RECOVERY_S)

    async def _check_first_answer(self, server: InferenceServer) -> None:
        """Check the first answer: a server may be healthy and yet unable to serve its model."""
        try:
            answer = probe.check_answer(server, "first", self._pool.vocabulary)
            if not await in_time(answer, self._settings.update_timeout_s, "update_timeout_s"):
                raise ServerLostError("another client has ended it")
        except ServerLostError as error:
            await asyncio.sleep(POLL_S)
            if server.has_served:
                raise ServerLostError(f"failed its first request: {error}") from None
            raise ServerRefusedError(f"is healthy but cannot serve this model: {error}") from None

    async def _watch(self, server: InferenceServer) -> None:
        """Check the health of a server regularly, and its answers if it is doubted.

        Raises:
            ServerLostError, RequestRefusedError: two checks failed one after another, or its program has ended.
        """
        failed_checks = 0
        while True:
            with suppress(TimeoutError):  # not `wait_for`, which in Python 3.11 may swallow a cancellation
                async with asyncio.timeout(self._settings.health_interval_s):
                    await server.doubted.wait()
            if server.state not in (State.READY, State.UPDATING):
                return
            try:
                await self._adapter.check_health(server.connection, self._settings.health_timeout_s)
                failed_checks = 0
            except (ServerLostError, RequestRefusedError) as error:
                failed_checks += 1
                if failed_checks == 2 or isinstance(error, ServerUnreachableError):
                    raise
            if server.doubted.is_set() and server.state is State.READY and not await self._check_doubted(server):
                await asyncio.sleep(POLL_S)  # then check it again, after the update
                continue
            server.doubted.clear()
            self._pool.on_change()

    async def _check_doubted(self, server: InferenceServer) -> bool:
        """Check an answer of a doubted server, and return whether that was possible. Raises as `check_answer` does."""
        if self.is_changing:
            return False
        server.requests += 1
        try:
            answer = probe.check_answer(server, "doubted", self._pool.vocabulary)
            is_complete: bool = await in_time(answer, self._settings.update_timeout_s, "update_timeout_s")
            return is_complete
        finally:
            server.requests -= 1

    async def _drain(self, server: InferenceServer) -> None:
        """Let a leaving server finish its requests. Those that remain continue elsewhere."""
        if not await server.wait_idle(self._settings.drain_timeout_s):
            with suppress(*FAULTS):
                await self._adapter.abort(server.connection)
            await server.wait_idle(POLL_S)
        self._forget(server)

    async def _retry(self, server: InferenceServer, failure: str) -> bool:
        """Pause, then try a lost or refused server again, for the cause may have passed.

        Returns:
            False if the driver is to restart it. `_replace` then starts a new task.
        """
        if server.is_abandoned:
            self._forget(server, "its `areal serve` no longer sends pings")
            return True
        first_s, longest_s = RETRY_PAUSES_S[server.state]
        server.retry_pause_s = min(longest_s, max(first_s, 2 * server.retry_pause_s))
        await asyncio.sleep(server.retry_pause_s)
        if server.is_own and not server.was_ready:
            self._driver.notify(RestartMember(server.name, failure))
            return False
        self._pool.move(server, State.STARTING)
        return True

    async def _watch_fleet(self) -> None:
        """Fail the fleet if too few servers have been ready for too long, or can become so."""
        now = asyncio.get_running_loop().time
        enough_at = now()
        while self._pool.failure is None:
            await asyncio.sleep(POLL_S)
            required, limit_s = self._settings.bounds.minimum, self._settings.start_timeout_s
            ready = len(self._pool.ready)
            if ready >= required or self.is_changing:  # also in the trainer's turn
                enough_at = now()
            lacking_s = now() - enough_at
            if lacking_s > limit_s or self._pool.possible < (1 if self._has_started else required):
                message = f"{ready} of {required} servers are ready, too few for {lacking_s:.0f} s"
                own_hint = _ELASTIC_HINT if self._settings.is_elastic else _OWN_HINT
                hint = own_hint if self._settings.servers else _ADDRESSES_HINT
                self._pool.fail(RunError(f"{message}; {self._pool.explain()}", hints=[hint]))

    # The weights of all servers.

    @property
    def is_started(self) -> bool:
        """Whether `start` was called, so that servers may join."""
        return self._model is not None

    @property
    def is_changing(self) -> bool:
        """Whether an update is announced or in progress, or waits for an overtaken server to be synced."""
        return self._changing.locked()

    async def announce_update(self) -> None:
        """Admit no server until the next `update_weights` is over: it would miss the update."""
        if not self._is_announced:
            await self._changing.acquire()
            self._is_announced = True

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `InferenceEngine.form_group`. Announces an update, which comes in any case: if the trainer cannot join
        the group, through a folder."""
        await self.announce_update()
        return await self._groups.form(address, port, backend, current_group)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`. Servers that fail are lost, and synced later."""
        await self.announce_update()
        self._is_announced = False
        try:
            shapes = (
                read_shapes(update.path) if update.path else {tensor.name: tensor.shape for tensor in update.tensors}
            )
            if not all(".lora_" in name for name in shapes):  # servers check an adapter themselves
                check_fit(shapes, self._shapes, is_tied=self._is_tied)
            await self._groups.joined()
            await self._update_all(update)
        finally:
            self._changing.release()
            if not self._generation_turn.is_set():
                self._driver.notify(ColocatedTraining(False))
            self._generation_turn.set()

    async def _update_all(self, update: WeightUpdate) -> None:
        # Servers that sleep are UPDATING since then.
        held = self._pool.in_state(State.READY, State.UPDATING)
        reached = [server for server in held if update.path or server.group or server.read_version == update.version]
        self._pool.hold(*held)
        faults = await asyncio.gather(*(self._update(server, update) for server in reached))
        # If the weights are in a folder and all servers only went away, they are synced from it when they are back.
        is_lost_only = update.path is not None and all(isinstance(fault, ServerLostError) for fault in faults)
        if all(faults) and not is_lost_only:
            # Servers that the update has touched are lost, those that read a part of it too (`Reading.end`). The
            # others hold the former version if they have memory.
            self._pool.put_back(*(s for s in held if s.state is State.UPDATING and s.has_memory))
            raise RunError(f"no server took over the weights of version {update.version}; {self._pool.explain()}")
        self._set_current(update)
        held = self._pool.in_state(State.UPDATING)
        self._pool.put_back(*(server for server in held if server.version == update.version))
        for server in held:
            if server.version != update.version:
                self._pool.lose(server, f"took no part in the update; {self._pool.reasons.get(server.name, '')}")

    async def _update(self, server: InferenceServer, update: WeightUpdate) -> Exception | None:
        """Update one server, and return its failure, None for none."""
        connection = server.connection
        try:
            seconds = await in_time(server.update(update), self._settings.update_timeout_s, "update_timeout_s")
        except FAULTS as error:
            if server.connection is connection:  # else the driver has already replaced the process that failed
                self._pool.lose(server, f"did not take over version {update.version}: {error}")
            return error
        for name, value in seconds.items():
            self.timings[f"weight_sync/{name}"] = max(value, self.timings.get(f"weight_sync/{name}", 0.0))
        return None

    def leave_out(self, names: Sequence[str]) -> None:
        """See `InferenceEngine.leave_out`."""
        self._shapes = {name: shape for name, shape in self._shapes.items() if name not in names}

    def needs_folder(self) -> bool:
        """See `InferenceEngine.needs_folder`."""
        return self._is_folder_missed and self._current.path is None

    def offer_folder(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.offer_folder`."""
        if self._current.version == update.version:
            self._set_current(update)

    def _set_current(self, update: WeightUpdate) -> None:
        self._current = update
        if update.path is None:
            self._has_folder.clear()
        else:
            self._has_folder.set()
            self._is_folder_missed = False

    # GPUs that servers share with the trainer.

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`. The trainer's turn on the shared GPUs begins, and the next update ends it.

        First wait for servers that are being started or synced.
        """
        await self.announce_update()
        self._generation_turn.clear()
        started = self._driver.request(ColocatedTraining(True), None, "servers that are being started")
        await asyncio.wrap_future(started)
        own = (server for server in self._pool.servers.values() if server.is_own and server.connection.address)
        await asyncio.gather(*map(self._free_memory, {*self._pool.ready, *own}))

    async def _free_memory(self, server: InferenceServer) -> None:
        """Return when a server has freed its GPU memory, or, for one of the run's own, its process has ended."""
        connection = server.connection
        if server.state is State.READY:
            self._pool.hold(server)
        try:
            async with server.sync_lock:
                await in_time(server.sleep(), self._settings.update_timeout_s, "update_timeout_s")
        except FAULTS as error:
            if server.connection is not connection:
                return  # the process that failed has ended, and so its memory is free
            self._pool.lose(server, f"did not free its GPU memory: {error}")
            if server.is_own:
                self._driver.notify(RestartMember(server.name, "did not free its GPU memory"))
                while server.connection is connection:
                    await asyncio.sleep(RESTART_POLL_S)


def _call_in_loop(loop: asyncio.AbstractEventLoop, report: Callable[[RoleMembers], None], servers: RoleMembers) -> None:
    """Call `report` in the event loop, from the thread of the connection to the driver, which outlives the loop."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(report, servers)
