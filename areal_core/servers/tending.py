"""What is done for each server as long as the run lasts: bring it up, watch it, bring it up again, let it go."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.data import SampledTokens, TokenIds
from areal_core.errors import RunError
from areal_core.interfaces import SamplingParameters, ServerLostError, ServerUnreachableError
from areal_core.messages.hub import Restart
from areal_core.servers.checks import check_identity
from areal_core.servers.errors import FAULTS, RequestRefusedError, ServerRefusedError, in_time, known_form
from areal_core.servers.interface import PartialGeneration
from areal_core.servers.pool import Member, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.interfaces import ModelReference
    from areal_core.launchers.member import Member as RunMember
    from areal_core.messages.hub import Server, Servers
    from areal_core.servers.interface import Chunk, ServerAdapter
    from areal_core.servers.pool import ServerPool
    from areal_core.servers.settings import ServerSettings
    from areal_core.servers.updating import Updater

LACK = "give the run more nodes, lower servers.minimum, or raise start_timeout_s: so long too few servers may be ready"
OWN_FAILED = "RUN_DIR/logs/server-0.log is all that a server said; start_timeout_s is how long they are waited for"
NONE_ANSWERS = "start them, or name others in inference_engine.addresses; with `servers` above 0 the run starts its own"
POLL_S, START_POLL_S = 0.25, 0.05
TOLD_S = 5.0
"""Of a server that does not answer yet, which is told then."""
PAUSES_S = {State.LOST: (1.0, 10.0), State.REFUSED: (30.0, 300.0)}
"""Until a server is tried again: at first, and at most."""
REVIVAL_S = 30.0
"""A server of the run that was healthy before and is not again within so long is ended and started again."""


@dataclass
class Tending:
    """Tends the servers of a fleet, each in a task of its own: brings them up, and does whatever else they need.

    The driver of the run starts the run's own servers, and says when one serves and when it does so no more. Each time
    one serves at a new address it begins from nothing known.

    Attributes:
        settings: of the fleet.
        pool: the servers.
        updater: gives them the current weights.
        model: that they must serve.
        adapter: speaks the servers' language.
        run: this process in the run that starts servers; None where all servers are somebody else's.
    """

    settings: ServerSettings
    pool: ServerPool
    updater: Updater
    model: ModelReference
    adapter: ServerAdapter
    run: RunMember | None = None
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _has_begun: bool = False

    async def start(self, gpus: Sequence[int] | None) -> None:
        """Begin to tend the servers that the settings name, and return when enough of them are ready.

        Args:
            gpus: of the run's own servers; None where they are not named.

        Raises:
            RunError: too few became ready; says why.
        """
        least = self.settings.bounds.minimum - len(self.settings.elsewhere)
        for number, own in enumerate(self.settings.gpus_of_servers(gpus)):
            member = self._add(f"server-{number}", "", own)
            if self.settings.is_elastic and number >= least:
                self.pool.move(member, State.WAITING)
        for address in self.settings.elsewhere:
            self._tend(self._add(address.split("//")[1], address))
        if self.run is not None and self.settings.servers:
            loop = asyncio.get_running_loop()
            self.run.watch("server", lambda servers: _in_loop(loop, self._see, servers))
        self._tasks[""] = start_task(self._watch_over_all(), "watch over the fleet")
        while len(self.pool.ready) < self.settings.bounds.minimum:
            if self.pool.failure is not None:
                raise self.pool.failure
            await asyncio.sleep(START_POLL_S)
        self._has_begun = True

    def join(self, name: str, address: str) -> None:
        """A server that somebody else has started shall be used; nothing happens where it is already.

        Raises:
            RunError: the name or the address is another server's.
        """
        known = [member for member in self.pool.members.values() if member.state is not State.GONE]
        for member in known:
            if (member.name == name) != (member.connection.address == address):
                raise RunError(
                    f"the run has a server {member.name} at {member.connection.address} already",
                    hints=["each needs a name and an address of its own; choose another --name"],
                )
        if name not in [member.name for member in known]:
            self._tend(self._add(name, address))
        self.pool.members[name].asked_at = asyncio.get_running_loop().time()

    def leave(self, name: str, address: str) -> None:
        """A server is to be taken out: nothing further is asked of it. Nothing happens where it is not known."""
        member = self.pool.members.get(name)
        if member is None or member.connection.address != address or member.state in (State.LEAVING, State.GONE):
            return
        if self.updater.is_changing and (member.group is not None or member.state is State.UPDATING):
            return  # others count on it until the update is over; who leaves asks again
        if member.state in (State.READY, State.UPDATING):
            self.pool.move(member, State.LEAVING)
            member.doubted.set()
        else:  # nothing is asked of it, whatever is being done to bring it up
            self._tasks[name].cancel()
            self.pool.move(member, State.GONE)
            member.connection.close()

    async def close(self) -> None:
        """Ask nothing further of any server; safe to call twice."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for member in self.pool.members.values():
            member.connection.close()

    def _add(self, name: str, address: str, gpus: tuple[int, ...] = ()) -> Member:
        mode, run = self.settings.update_mode, self.pool.run_id
        member = Member(
            name, self.adapter, self.adapter.connect(address, self.settings), mode, run, is_own=not address, gpus=gpus
        )
        member.patience_s = self.settings.drain_timeout_s
        self.pool.members[name] = member
        return member

    def _tend(self, member: Member) -> None:
        self._tasks[member.name] = start_task(self._keep(member), f"tending {member.name}")

    def _see(self, servers: Servers) -> None:
        """The driver says which of the run's own servers serve, and which it starts no more."""
        if self.pool.failure is not None:
            return
        serving = {server.name: server for server in servers.serving}
        for member in [one for one in self.pool.members.values() if one.is_own]:
            server = serving.get(member.name)
            if member.connection.address != (server.address if server else ""):
                self._begin(member, server)
            member.is_given_up = member.name in servers.failed
            if (why := servers.failed.get(member.name)) and member.state is not State.REFUSED:
                self.pool.lose(member, why, State.REFUSED)

    def _begin(self, member: Member, server: Server | None) -> None:
        """A process of one of the run's own servers is gone, and another one may serve in its place."""
        if task := self._tasks.pop(member.name, None):
            task.cancel()
        if member.connection.address:
            self.pool.lose(member, "its process has ended", State.WAITING if self.settings.is_elastic else State.LOST)
        member.connection = self.adapter.connect(server.address if server else "", self.settings)
        if server is not None:  # one that was adopted holds what the attempt before gave it
            member.version, member.has_memory = 0 if server.is_fresh else -1, True
            self._tend(member)

    async def _keep(self, member: Member) -> None:
        """Until the server is gone for good: whatever fails is tried again, for its cause may pass."""
        pause, why = 0.0, ""
        while member.state is not State.GONE:
            was_up = False
            try:
                await self._bring_up(member)
                pause, was_up = 0.0, True
                await self._watch(member)
            except (ServerRefusedError, *FAULTS, OSError) as error:
                why = str(error)
                self.pool.lose(member, why, State.REFUSED if isinstance(error, ServerRefusedError) else State.LOST)
            if member.state in PAUSES_S and member.is_lost:
                self.pool.move(member, State.GONE, "its program is not heard any more")
            elif member.state in PAUSES_S:
                first, longest = PAUSES_S[member.state]
                pause = min(longest, max(first, 2 * pause))
                await asyncio.sleep(pause)
                if member.is_own and not was_up and self.run is not None:
                    self.run.notify(Restart(member.name, why))
                    return  # it begins anew when the driver says where

    async def _bring_up(self, member: Member) -> None:
        """From nothing known to ready.

        Raises:
            ServerRefusedError: the run cannot use it.
            ServerLostError, UpdateRefusedError, RequestRefusedError: it failed on the way.
        """
        self.pool.move(member, State.STARTING)
        await self._wait_until_healthy(member)
        with known_form():
            member.identity = await member.adapter.identify(member.connection)
        check_identity(member.identity, self.model)
        self.pool.move(member, State.SYNCING)
        if member.version == 0:
            await member.adapter.set_label(member.connection, member.label(0))
        await self.updater.sync_on_join(member, self._see_it_answers, self._ask_first)

    async def _wait_until_healthy(self, member: Member) -> None:
        patience = REVIVAL_S if member.is_own else self.settings.start_timeout_s
        now, is_reported = asyncio.get_running_loop().time, member.is_own
        began = now()
        while True:
            try:
                await member.adapter.check_health(member.connection, self.settings.health_timeout_s)
                return
            except (ServerLostError, RequestRefusedError) as error:
                self.pool.note(member, str(error))
                if not is_reported and now() > began + TOLD_S:
                    is_reported = True
                    self.pool.log(f"{member.name} does not answer yet, and is waited for: {error}")
                if now() > began + patience or member.is_lost:
                    raise ServerLostError(f"was not healthy within {patience:g} s; {error}") from None
                await asyncio.sleep(POLL_S)

    async def _see_it_answers(self, member: Member) -> None:
        """One that outlived its trainer may wait for ever in a broadcast of which nothing comes any more: its GPU is
        blocked, and nothing but its end helps."""
        if not member.is_own or member.version >= 0 or not member.has_memory:
            return
        # An update that broke off may have left it stopped.
        await in_time(member.adapter.resume(member.connection), REVIVAL_S)
        await in_time(self._ask(member, "revived"), REVIVAL_S)

    async def _ask(self, member: Member, what: str) -> list[Chunk]:
        sampling = SamplingParameters(max_new_tokens=2)
        name, adapter = f"{what}-{member.name}-{secrets.token_hex(4)}", member.adapter.name_of(member.connection)
        partial = PartialGeneration(name, TokenIds([1]), sampling, 1, f"first-{member.version}", adapter=adapter)
        with known_form():
            return [chunk async for chunk in member.adapter.generate(member.connection, partial)]

    async def _ask_first(self, member: Member) -> None:
        """A first request: a server may be healthy and yet unable to serve its model."""
        try:
            limit = self.settings.update_timeout_s, "update_timeout_s"
            if not await in_time(self._try_out(member, "first"), *limit):
                raise ServerLostError("somebody has ended it")
        except ServerLostError as error:
            await asyncio.sleep(POLL_S)
            if member.has_served:
                raise ServerLostError(f"failed its first request: {error}") from None
            raise ServerRefusedError(f"is healthy but cannot serve this model: {error}") from None

    async def _try_out(self, member: Member, what: str) -> bool:
        """Whether it answers as it should; False where an update has ended the request.

        Raises:
            ServerLostError: it does not.
        """
        versions = {member.version}
        chunks = await self._ask(member, what)
        versions.add(member.version)
        sampled = SampledTokens()
        with known_form():
            for chunk in chunks:
                sampled.extend(chunk.output_ids, chunk.logprobs)
        labels = {span[0] for chunk in chunks for span in chunk.spans or ()}
        if chunks and chunks[-1].finish == "abort":
            return False
        if fault := sampled.fault(self.pool.vocabulary) or ("" if len(sampled) else "nothing"):
            raise ServerLostError(f"gives {fault}")
        if labels - set(map(member.label, versions)):
            message = f"labels its weights {', '.join(labels)} instead of {member.label(member.version)}"
            raise ServerLostError(f"{message}: another program may have changed them")
        return True

    async def _watch(self, member: Member) -> None:
        misses = 0
        while True:
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(self.settings.health_interval_s):
                    await member.doubted.wait()
            if member.state is State.LEAVING:
                await self._drain(member)
            if member.state in (State.LOST, State.GONE):
                return
            try:
                await member.adapter.check_health(member.connection, self.settings.health_timeout_s)
                misses = 0
            except (ServerLostError, RequestRefusedError) as error:
                misses += 1
                if misses == 2 or isinstance(error, ServerUnreachableError):
                    raise
            if member.doubted.is_set() and member.state is State.READY and not await self._look(member):
                await asyncio.sleep(POLL_S)  # and again, behind the update
                continue
            member.doubted.clear()
            self.pool.on_change()

    async def _look(self, member: Member) -> bool:
        """Whether a server that is doubted could be tried out; raises as `_try_out` does where it failed."""
        if self.updater.is_changing:
            return False
        member.requests += 1
        try:
            return await in_time(self._try_out(member, "doubted"), self.settings.update_timeout_s, "update_timeout_s")
        finally:
            member.requests -= 1

    async def _drain(self, member: Member) -> None:
        if not await member.wait_idle(self.settings.drain_timeout_s):
            with suppress(*FAULTS):
                await member.adapter.abort(member.connection)
            await member.wait_idle(POLL_S)
        self.pool.move(member, State.GONE)
        member.connection.close()

    async def _watch_over_all(self) -> None:
        """The fleet has failed where too few servers have been ready for too long, or will be."""
        now = asyncio.get_running_loop().time
        enough_at = now()
        while self.pool.failure is None:
            await asyncio.sleep(POLL_S)
            wanted, limit = self.settings.bounds.minimum, self.settings.start_timeout_s
            if len(self.pool.ready) >= wanted or self.updater.is_changing:  # which the trainer's turn is, too
                enough_at = now()
            lacking_s, ready = now() - enough_at, len(self.pool.ready)
            if lacking_s > limit or self.pool.possible < (1 if self._has_begun else wanted):
                message = f"{ready} of {wanted} servers are ready, too few for {lacking_s:.0f} s; {self.pool.explain()}"
                own = LACK if self.settings.is_elastic else OWN_FAILED
                self.pool.fail(RunError(message, hints=[own if self.settings.servers else NONE_ANSWERS]))


def _in_loop(loop: asyncio.AbstractEventLoop, see: Callable[[Servers], None], servers: Servers) -> None:
    """In the thread of the connection to the driver, which outlives the loop."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(see, servers)
