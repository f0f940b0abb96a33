"""The weights that servers must hold, and how they come by them."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.disk import read_shapes
from areal_core.errors import RunError
from areal_core.interfaces import BroadcastGroup, ServerLostError, WeightUpdate
from areal_core.messages.hub import Restart, TrainersTurn
from areal_core.servers.checks import check_fit
from areal_core.servers.errors import FAULTS, RequestRefusedError, UpdateRefusedError, in_time, known_form
from areal_core.servers.interface import WeightGroup
from areal_core.servers.pool import State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from areal_core.launchers.member import Member as RunMember
    from areal_core.servers.interface import ServerAdapter
    from areal_core.servers.pool import Member, ServerPool

POLL_S = 0.05


class BroadcastGroups:
    """Forms a group of all ready servers and keeps it for as long as they are the same.

    Args:
        adapter: of the servers.
        pool: the servers.
        timeout_s: in which they must meet.
        note: file for the name of the group. Servers outlive whoever formed it, and would keep it: they are told to
            leave it by the next one, whom nobody else could tell its name.
    """

    def __init__(self, adapter: ServerAdapter, pool: ServerPool, timeout_s: float, note: Path) -> None:
        self._adapter = adapter
        self._pool = pool
        self._timeout_s = timeout_s
        self._note = note
        self._former = note.read_text() if note.is_file() else ""
        self._group: WeightGroup | None = None
        self._joining: list[asyncio.Task[None]] = []

    async def form(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `BroadcastReceiver.form_group`."""
        ready = self._pool.ready
        prefixes = self._adapter.group_store_prefixes.get(backend)
        ranks = [member.identity.ranks if member.identity else 1 for member in ready]
        same, world_size = set(self._joined()) == set(ready), 1 + sum(ranks)
        # With a lost server in it a broadcast would wait for that one.
        if same and (group := self._group) and (group.name, group.world_size) == (current_group, world_size):
            return self._described(group, prefixes or (), is_new=False)
        await self._dissolve()
        if not ready or prefixes is None:
            return None
        name = f"areal-{secrets.token_hex(4)}"
        with suppress(OSError):
            self._note.write_text(name)
        self._group = WeightGroup(name, address, port, world_size, backend)
        first = [1 + sum(ranks[:place]) for place in range(len(ranks))]
        self._joining = [
            start_task(self._join(member, self._group, rank), f"{member.name} joining the group {name}")
            for member, rank in zip(ready, first, strict=True)
        ]
        return self._described(self._group, prefixes, is_new=True)

    async def joined(self) -> None:
        """Wait until every member has joined or failed to."""
        joining, self._joining = self._joining, []
        await asyncio.gather(*joining)

    async def _join(self, member: Member, group: WeightGroup, first_rank: int) -> None:
        if self._former:
            await self._leave(member, replace(group, name=self._former))
        try:
            with known_form():
                joining = self._adapter.join_group(member.connection, group, first_rank)
                await in_time(joining, self._timeout_s, "group_timeout_s")
            member.group = group
        except FAULTS as error:  # it takes no part in the broadcast, and catches up from a folder
            self._pool.note(member, f"did not join the group of the broadcast: {error}")

    async def _dissolve(self) -> None:
        for task in self._joining:
            task.cancel()
        self._joining = []
        group, self._group = self._group, None
        for member in self._joined():
            assert group is not None
            member.group = None
            await self._leave(member, group)

    async def _leave(self, member: Member, group: WeightGroup) -> None:
        with suppress(*FAULTS):
            await in_time(self._adapter.leave_group(member.connection, group), self._timeout_s, "group_timeout_s")

    def _joined(self) -> list[Member]:
        return [member for member in self._pool.members.values() if member.group is not None]

    @staticmethod
    def _described(group: WeightGroup, prefixes: Sequence[str], *, is_new: bool) -> BroadcastGroup:
        filled = tuple(prefix.format(group=group.name) for prefix in prefixes)
        return BroadcastGroup(group.name, group.world_size, filled, is_new)


class Updater:
    """Changes the weights of servers: of all that are ready at once, and of others as they come.

    Args:
        pool: the servers.
        groups: in which weights are broadcast to them.
        timeout_s: of an update of one server.
        run: this process in the run that starts the servers; None where none does.

    Attributes:
        timings: of the last update, in seconds; the slowest server's.
    """

    def __init__(
        self, pool: ServerPool, groups: BroadcastGroups, timeout_s: float, run: RunMember | None = None
    ) -> None:
        self._pool = pool
        self._run = run
        self._groups = groups
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()
        self._is_agreed = self._is_tied = False
        self._may_sync = asyncio.Event()  # clear in the trainer's turn, where it shares GPUs with the servers
        self._may_sync.set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._current = WeightUpdate(0, None)
        self._has_folder = asyncio.Event()
        self._missed = False
        self.timings: dict[str, float] = {}

    def begin(self, model: Path, *, is_tied: bool) -> None:
        """The weights of version 0 are those of a model's folder.

        Args:
            model: the folder.
            is_tied: whether its head is its embeddings.

        Raises:
            RunError: it holds none, or some that are not complete.
        """
        self._shapes, self._is_tied = read_shapes(model), is_tied
        self._set_current(WeightUpdate(0, model))

    def _set_current(self, update: WeightUpdate) -> None:
        self._current = update
        if update.path is None:
            self._has_folder.clear()  # who waits for a folder waits on behind a broadcast
        else:
            self._has_folder.set()
            self._missed = False

    @property
    def is_changing(self) -> bool:
        """Whether weights change now."""
        return self._changing.locked()

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `BroadcastReceiver.form_group`. No server is admitted between this and the update, for it would miss it.

        The update comes for sure: where the trainer cannot join the group, through a folder.
        """
        await self.agree()
        return await self._groups.form(address, port, backend, current_group)

    async def agree(self) -> None:
        """An update will come, and until then no server is admitted."""
        if not self._is_agreed:
            await self._changing.acquire()
            self._is_agreed = True

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`: servers that fail are taken out and catch up later."""
        await self.agree()
        self._is_agreed = False
        try:
            shapes = read_shapes(update.path) if update.path else {one.name: one.shape for one in update.tensors}
            if not all(".lora_" in name for name in shapes):  # an adapter is judged by the servers that take it
                check_fit(shapes, self._shapes, is_tied=self._is_tied)
            await self._groups.joined()
            await self._change(update)
        finally:
            self._changing.release()
            if self._run is not None and not self._may_sync.is_set():
                self._run.notify(TrainersTurn(False))
            self._may_sync.set()

    async def _change(self, update: WeightUpdate) -> None:
        # Those without memory have been waiting for this since they gave it away.
        live = self._pool.those(State.READY, State.UPDATING)
        members = [m for m in live if update.path or m.group or m.has_read == update.version]
        self._pool.hold(*live)
        faults = await asyncio.gather(*(self._update(member, update) for member in members))
        # Servers that only went away catch up from the folder when they are back.
        if all(faults) and (update.path is None or not all(isinstance(fault, ServerLostError) for fault in faults)):
            # Nobody touched the others: they hold the former version.
            self._pool.put_back(*(m for m in live if m.state is State.UPDATING and m.has_memory))
            raise RunError(f"no server took over the weights of version {update.version}; {self._pool.explain()}")
        self._set_current(update)
        held = self._pool.those(State.UPDATING)
        self._pool.put_back(*(member for member in held if member.version == update.version))
        for member in held:
            if member.version != update.version:
                self._pool.lose(member, f"took no part; {self._pool.reasons.get(member.name, 'it came meanwhile')}")

    async def _update(self, member: Member, update: WeightUpdate) -> Exception | None:
        """What went wrong, None for nothing."""
        try:
            seconds = await in_time(member.update(update), self._timeout_s, "update_timeout_s")
        except FAULTS as error:
            self._pool.lose(member, f"did not take over version {update.version}: {error}")
            return error
        for name, value in seconds.items():
            self.timings[f"weight_sync/{name}"] = max(value, self.timings.get(f"weight_sync/{name}", 0.0))
        return None

    async def sync_on_join(
        self,
        member: Member,
        revive: Callable[[Member], Awaitable[None]],
        try_out: Callable[[Member], Awaitable[None]],
    ) -> None:
        """Give a server that is asked nothing the current weights, try it out under them, and let it be asked.

        This goes on beside everything else. A server that was overtaken by new weights meanwhile holds the next ones
        back until it is through: else one that loads for longer than the trainer trains would never join.

        Args:
            member: the server.
            revive: called before it is given weights.
            try_out: called when it has them.

        Raises:
            ServerLostError, UpdateRefusedError: it does not hold the weights for sure.
        """
        is_late = False
        while True:
            if self._current.path is None:
                self._missed = True
                await self._has_folder.wait()
            await self._may_sync.wait()
            async with self._changing if is_late else nullcontext(), member.being_synced:
                if (current := self._current).path is None or not self._may_sync.is_set():
                    continue
                try:
                    await revive(member)
                    if member.version != current.version:
                        await in_time(member.sync(current), self._timeout_s, "update_timeout_s")
                    await try_out(member)
                except UpdateRefusedError:
                    if self._current is current:
                        raise  # else newer weights have taken the place of these
                if self._current is current and (is_late or not self._changing.locked()):
                    self._pool.admit(member)
                    return
            is_late = True

    def needs_folder(self) -> bool:
        """See `BroadcastReceiver.needs_folder`."""
        return self._missed and self._current.path is None

    def offer_folder(self, update: WeightUpdate) -> None:
        """See `BroadcastReceiver.offer_folder`."""
        if self._current.version == update.version:
            self._set_current(update)

    async def sleep(self) -> None:
        """See `MemorySharer.sleep`. An update ends the trainer's turn: until then no server is admitted, and
        none of the run's own is started, synced or asked. Those that are being started or synced are waited for."""
        await self.agree()
        self._may_sync.clear()
        if self._run is not None:
            await asyncio.wrap_future(self._run.request(TrainersTurn(True), None, "servers that are being started"))
        own = (member for member in self._pool.members.values() if member.is_own and member.connection.address)
        await asyncio.gather(*map(self._release, {*self._pool.ready, *own}))

    async def _release(self, member: Member) -> None:
        """Return when the memory of one of the run's own servers, on which the trainer counts, is free."""
        connection = member.connection
        if member.state is State.READY:
            self._pool.hold(member)
        try:
            async with member.being_synced:
                await in_time(member.sleep(), self._timeout_s, "update_timeout_s")
        except (ServerLostError, RequestRefusedError) as error:
            self._pool.lose(member, f"did not give its memory away: {error}")
            if self._run is not None and member.is_own:
                self._run.notify(Restart(member.name, "did not give its memory away"))
                while member.connection is connection:
                    await asyncio.sleep(POLL_S)
