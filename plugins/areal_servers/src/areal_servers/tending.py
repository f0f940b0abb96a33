"""What is done for each server as long as the run lasts: start it, bring it up, watch it, begin again, let it go."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces import Needs, SamplingParameters
from areal_core.launchers.launched import LaunchedProcess
from areal_servers.checks import check_identity
from areal_servers.connection import ServerConnection
from areal_servers.errors import FAULTS, RequestRefusedError, ServerLostError, ServerRefusedError, known_form
from areal_servers.interface import Piece
from areal_servers.roster import Member, State
from areal_servers.settings import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.interfaces import ModelReference, Processes
    from areal_servers.interface import ServerAdapter
    from areal_servers.roster import Roster
    from areal_servers.settings import FleetSettings
    from areal_servers.updating import Updater

LACK = "give the run more nodes, lower servers.minimum, or raise start_timeout_s: so long too few servers may be ready"
POLL_S = 0.25
TOLD_S = 5.0
"""With fewer servers than the minimum, which is told then."""
PAUSES_S = {State.LOST: (1.0, 10.0), State.REFUSED: (30.0, 300.0), State.WAITING: (2.0, 5.0)}
"""Until a server is tried again: at first, and at most."""
REVIVAL_S = 30.0
"""A process of the run that was ready before and does not come back within so long is started anew."""


@dataclass
class Admission:
    """Brings servers up.

    Attributes:
        settings: of the fleet.
        roster: the servers.
        updater: gives them the current weights.
        model: that they must serve.
    """

    settings: FleetSettings
    roster: Roster
    updater: Updater
    model: ModelReference

    async def bring_up(self, member: Member) -> None:
        """From nothing known to ready.

        Raises:
            ServerRefusedError: the run cannot use it.
            ServerLostError, UpdateRefusedError, RequestRefusedError: it failed on the way.
        """
        self.roster.move(member, State.STARTING)
        await self._wait_until_healthy(member)
        with known_form():
            member.identity = await member.adapter.identify(member.connection)
        check_identity(member.identity, self.model)
        self.roster.move(member, State.CATCHING_UP)
        if member.version == 0:
            await member.adapter.set_label(member.connection, member.label(0))
        await self.updater.bring_in(member, self._ask_first)

    async def _wait_until_healthy(self, member: Member) -> None:
        is_revived = member.process and member.version < 0 and member.has_served  # an adopted one may be loading
        patience = REVIVAL_S if is_revived else self.settings.start_timeout_s
        deadline = time.monotonic() + patience
        while True:
            if member.process is not None and not member.process.is_running:
                words = member.process.last_words()
                if member.has_served or "address already in use" in words.lower():  # a port is taken now and then
                    raise ServerLostError(f"has ended: {words}")
                raise ServerRefusedError(f"ended before it was ready; {words}")
            try:
                await member.connection.get(member.adapter.health_path, self.settings.health_timeout_s)
                return
            except (ServerLostError, RequestRefusedError) as error:
                if isinstance(error, RequestRefusedError):  # a gateway says 404 for a server that loads
                    self.roster.note(member, str(error))
                if time.monotonic() > deadline or member.is_forsaken:
                    raise ServerLostError(f"was not healthy within {patience:g} s; {error}") from None
                await asyncio.sleep(POLL_S)

    async def _ask_first(self, member: Member) -> None:
        """A first request: a server may be healthy and yet unable to serve its model."""
        sampling = SamplingParameters(max_new_tokens=2)
        piece = Piece(f"first-{member.name}-{time.monotonic_ns()}", [1], sampling, 1, f"first-{member.version}")
        try:
            with known_form():
                async with asyncio.timeout(self.settings.update_timeout_s):
                    chunks = [chunk async for chunk in member.adapter.generate(member.connection, piece)]
        except (ServerLostError, TimeoutError) as error:
            words = str(error) or "no answer in time"
            await asyncio.sleep(POLL_S)
            if member.has_served:
                raise ServerLostError(f"failed its first request: {words}") from None
            if member.process is not None:
                words = f"{words}; {member.process.last_words()}"
            raise ServerRefusedError(f"is healthy but cannot serve this model: {words}") from None
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        labels = {span[0] for chunk in chunks for span in chunk.spans or ()}
        if not logprobs or not all(math.isfinite(value) and value <= 0 for value in logprobs):
            raise ServerRefusedError(f"gives log-probabilities that are none: {logprobs}")
        if labels - {member.label(member.version)}:
            raise ServerLostError(f"labels its weights {', '.join(labels)} instead of {member.label(member.version)}")


@dataclass
class Tending(Admission):
    """Tends the servers of a fleet, each in a task of its own: brings them up, and does whatever else they need.

    Attributes:
        adapter: speaks the servers' language.
    """

    adapter: ServerAdapter
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _has_begun: bool = False
    _placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Until a server is started, another would find the same room."""

    async def start(self, processes: Processes, gpus: Sequence[int] | None) -> None:
        """Begin to tend the servers that the settings name, and return when enough of them are ready.

        Args:
            processes: start those of the run itself.
            gpus: for these, divided among them; None leaves the choice to the environment.

        Raises:
            RunError: too few became ready; says why.
        """
        ranks = self.settings.tensor_parallel * self.settings.data_parallel  # of one server
        own, is_elastic = None if gpus is None else tuple(gpus), self.settings.is_elastic
        for number in range(self.settings.bounds.maximum):
            fixed = own and own[number * ranks : (number + 1) * ranks]
            needs = Needs(gpus=own, spare=ranks) if is_elastic else Needs(gpus=fixed)
            self._add(f"server-{number}", "", LaunchedProcess(processes, f"server-{number}", needs, self.settings.key))
        for address in self.settings.addresses:
            self._add(address.split("//")[1], address)
        self._tasks[""] = start_task(self._watch_over_all(), "watch over the fleet")
        while len(self.roster.ready) < self.settings.bounds.minimum:
            if self.roster.failure is not None:
                raise self.roster.failure
            await asyncio.sleep(POLL_S)
        self._has_begun = True

    def join(self, name: str, address: str) -> None:
        """A server that somebody else has started shall be used; nothing happens where it is already.

        Raises:
            RunError: the name or the address is another server's.
        """
        known = [member for member in self.roster.members.values() if member.state is not State.GONE]
        for member in known:
            if (member.name == name) != (member.connection.address == address):
                raise RunError(
                    f"the run has a server {member.name} at {member.connection.address} already",
                    hints=["each needs a name and an address of its own; choose another --name"],
                )
        if name not in [member.name for member in known]:
            self._add(name, address)
        self.roster.members[name].asked_at = time.monotonic()

    def leave(self, name: str, address: str) -> None:
        """A server is to be taken out: nothing further is asked of it. Nothing happens where it is not known."""
        member = self.roster.members.get(name)
        if member is None or member.connection.address != address or member.state in (State.LEAVING, State.GONE):
            return
        if member.state in (State.READY, State.UPDATING):
            self.roster.move(member, State.LEAVING)
            member.doubted.set()
        else:  # nothing is asked of it, whatever is being done to bring it up
            self._tasks[name].cancel()
            self.roster.move(member, State.GONE)
            start_task(member.connection.close(), f"closing the connection to {name}")

    async def close(self) -> None:
        """Let go of all servers, and end those of the run itself; safe to call twice."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        members = self.roster.members.values()
        await asyncio.gather(*(member.connection.close() for member in members))
        await asyncio.gather(*(member.process.end() for member in members if member.process))

    def _add(self, name: str, address: str, process: LaunchedProcess | None = None) -> None:
        connection = ServerConnection(address, self.settings.key, self.settings.silence_timeout_s)
        member = Member(name, self.adapter, connection, self.settings.update_mode, self.roster.mark, process)
        self.roster.members[name] = member
        self._tasks[name] = start_task(self._tend(member), f"tending {name}")

    async def _tend(self, member: Member) -> None:
        """Until the server is gone for good: whatever fails is tried again, for its cause may pass."""
        pause = 0.0
        while member.state is not State.GONE:
            was_up = False
            try:
                if member.process is not None and not member.process.is_running:
                    async with self._placing:
                        await self._launch(member, member.process)
                await self.bring_up(member)
                pause, was_up = 0.0, True
                await self._watch(member)
            except (ServerRefusedError, RunError) as error:
                is_homeless = isinstance(error, RunError) and member.process and not member.process.is_running
                waits = is_homeless and self.settings.is_elastic
                self.roster.lose(member, str(error), State.WAITING if waits else State.REFUSED)
            except (*FAULTS, OSError) as error:
                self.roster.lose(member, str(error))
            if member.process is not None and not was_up:
                await member.process.end()  # it could not be brought up; a new start may help
            if member.state in PAUSES_S and member.is_forsaken:
                self.roster.move(member, State.GONE, "its program is not heard any more")
            elif member.state in PAUSES_S:
                first, longest = PAUSES_S[member.state]
                pause = min(longest, max(first, 2 * pause))
                await asyncio.sleep(pause)
                if was_up and member.process is not None and not member.process.is_running:
                    # Its clients may have met a closed port before its end was told.
                    self.roster.note(member, member.process.last_words(), aloud=True)

    async def _launch(self, member: Member, process: LaunchedProcess) -> None:
        if not member.starts and (address := await process.adopt()):
            member.connection.address = address
            return
        now, window = time.monotonic(), self.settings.restart_window_s
        member.starts = [start for start in member.starts if now - start < window]
        if len(member.starts) > self.settings.restarts:
            raise ServerRefusedError(f"ended {len(member.starts)} times in {window:g} s; {process.last_words()}")
        _, host, port, _ = await process.find_place()
        member.starts.append(now)
        if host not in LOOPBACK and not self.settings.key:
            raise ServerRefusedError(f"would listen on {host} without a key: set inference_engine.api_key=env:NAME")
        member.version, member.has_memory = 0, True
        member.connection.address = f"http://{host}:{port}"
        command = self.adapter.command(self.model, host, port)
        await process.start("server", command.arguments, command.environment)

    async def _watch(self, member: Member) -> None:
        misses = 0
        while True:
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(self.settings.health_interval_s):
                    await member.doubted.wait()
            member.doubted.clear()
            if member.state is State.LEAVING:
                await self._drain(member)
            if member.state in (State.LOST, State.GONE):
                return
            if member.process is not None and not member.process.is_running:
                raise ServerLostError(member.process.last_words())
            try:
                await member.connection.get(member.adapter.health_path, self.settings.health_timeout_s)
                misses = 0
            except (ServerLostError, RequestRefusedError) as error:
                misses += 1
                if misses == 2 or "Connect" in str(error):
                    raise

    async def _drain(self, member: Member) -> None:
        if not await member.wait_idle(self.settings.drain_timeout_s):
            with suppress(*FAULTS):
                await member.adapter.abort(member.connection)
            await member.wait_idle(POLL_S)
        self.roster.move(member, State.GONE)
        await member.connection.close()
        if member.process is not None:
            await member.process.end()

    async def _watch_over_all(self) -> None:
        """The fleet has failed where too few servers have been ready for too long, or will be."""
        enough_at, is_told = time.monotonic(), False
        while self.roster.failure is None:
            await asyncio.sleep(POLL_S)
            wanted, limit = self.settings.bounds.minimum, self.settings.start_timeout_s
            # Those without memory wait for the trainer.
            are_waiting = any(not member.has_memory for member in self.roster.members.values())
            if len(self.roster.ready) >= wanted or self.updater.is_changing or are_waiting:
                enough_at, is_told = time.monotonic(), False
            lacking_s, ready = time.monotonic() - enough_at, len(self.roster.ready)
            if lacking_s > limit or self.roster.possible < (1 if self._has_begun else wanted):
                told = f"{ready} of {wanted} servers are ready, since {lacking_s:.0f} s; {self.roster.explain()}"
                self.roster.fail(RunError(told, hints=[LACK]))
            elif self._has_begun and lacking_s > TOLD_S and not is_told:
                is_told = True
                sys.stderr.write(f"{ready} of {wanted} servers are ready; the run goes on so for {limit:.0f} s\n")
