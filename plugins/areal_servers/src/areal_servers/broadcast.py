"""Groups in which the trainer broadcasts weights to servers; each has an epoch, and ends with any of its members."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.interfaces.inference import BroadcastGroup
from areal_servers.interface import RequestRefusedError, ServerLostError, UpdateRefusedError, WeightGroup
from areal_servers.member import known_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_servers.interface import ServerAdapter
    from areal_servers.member import Member

_FAULTS = (ServerLostError, UpdateRefusedError, RequestRefusedError)


class BroadcastGroups:
    """Forms a group of all ready servers and keeps it for as long as they are the same.

    Args:
        adapter: of the servers.
    """

    def __init__(self, adapter: ServerAdapter) -> None:
        self._adapter = adapter
        self._group: WeightGroup | None = None
        self._members: list[Member] = []
        self._joining: list[asyncio.Task[None]] = []

    async def form(
        self, ready: Sequence[Member], address: str, port: int, backend: str, standing: str
    ) -> BroadcastGroup | None:
        """See `BroadcastReceiver.form_group`."""
        prefixes = self._adapter.group_store_prefixes.get(backend)
        if self._group is not None and self._group.name == standing and self._fits(ready):
            return self._described(self._group, prefixes or (), is_new=False)
        await self._dissolve()
        if not ready or prefixes is None:
            return None
        ranks = [member.identity.ranks if member.identity else 1 for member in ready]
        name = f"areal-{secrets.token_hex(4)}"
        self._group = WeightGroup(name, address, port, 1 + sum(ranks), backend)
        self._members = list(ready)
        first = [1 + sum(ranks[:place]) for place in range(len(ranks))]
        self._joining = [
            asyncio.create_task(self._join(member, self._group, rank))
            for member, rank in zip(self._members, first, strict=True)
        ]
        return self._described(self._group, prefixes, is_new=True)

    async def joined(self) -> None:
        """Wait until every member has joined or failed to."""
        if self._joining:
            await asyncio.gather(*self._joining)
            self._joining = []

    def _fits(self, ready: Sequence[Member]) -> bool:
        return set(ready) == set(self._members) and all(member.group is self._group for member in ready)

    async def _join(self, member: Member, group: WeightGroup, first_rank: int) -> None:
        with suppress(*_FAULTS):  # it then takes no part in the broadcast, and catches up from a folder
            with known_form():
                await self._adapter.join_group(member.connection, group, first_rank)
            member.group = group

    async def _dissolve(self) -> None:
        group, self._group = self._group, None
        for task in self._joining:
            task.cancel()
        self._joining = []
        for member in self._members:
            if group is not None and member.group is group:
                member.group = None
                with suppress(*_FAULTS):
                    await self._adapter.leave_group(member.connection, group)
        self._members = []

    @staticmethod
    def _described(group: WeightGroup, prefixes: Sequence[str], *, is_new: bool) -> BroadcastGroup:
        filled = tuple(prefix.format(group=group.name) for prefix in prefixes)
        return BroadcastGroup(group.name, group.world_size, filled, is_new)
