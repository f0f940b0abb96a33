"""The process group in which the trainer broadcasts weights to servers."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.inference.adapter import WeightGroup
from areal_core.inference.errors import FAULTS, in_time, known_form
from areal_core.interfaces.inference import BroadcastGroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.inference.adapter import ServerAdapter
    from areal_core.inference.pool import ServerPool
    from areal_core.inference.server import InferenceServer


class BroadcastGroups:
    """Forms a group of all ready servers, and keeps it as long as they are the same.

    Args:
        adapter: speaks to the servers.
        pool: the servers.
        timeout_s: seconds in which they must join.
        note: file that holds the name of the group. Servers outlive the controller that formed it and would stay in the
            group. The next controller reads the name here, and has them leave it.
    """

    def __init__(self, adapter: ServerAdapter, pool: ServerPool, timeout_s: float, note: Path) -> None:
        self._adapter = adapter
        self._pool = pool
        self._timeout_s = timeout_s
        self._note = note
        self._former_name = note.read_text() if note.is_file() else ""
        self._group: WeightGroup | None = None
        self._joining: list[asyncio.Task[None]] = []

    async def form(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `InferenceEngine.form_group`."""
        ready = self._pool.ready
        prefixes = self._adapter.group_store_prefixes.get(backend)
        ranks = [server.identity.ranks if server.identity else 1 for server in ready]
        world_size = 1 + sum(ranks)
        # A broadcast to a group with a lost server in it would wait for that server.
        is_same = set(self._members()) == set(ready)
        if is_same and (group := self._group) and (group.name, group.world_size) == (current_group, world_size):
            return _described(group, prefixes or (), is_new=False)
        await self._dissolve()
        if not ready or prefixes is None:
            return None
        name = f"areal-{secrets.token_hex(4)}"
        with suppress(OSError):
            self._note.write_text(name)
        self._group = WeightGroup(name, address, port, world_size, backend)
        first_ranks = [1 + sum(ranks[:index]) for index in range(len(ranks))]
        self._joining = [
            start_task(self._join(server, self._group, first_rank), f"{server.name} joining the group {name}")
            for server, first_rank in zip(ready, first_ranks, strict=True)
        ]
        return _described(self._group, prefixes, is_new=True)

    async def joined(self) -> None:
        """Wait until every server has joined or failed to."""
        joining, self._joining = self._joining, []
        await asyncio.gather(*joining)

    async def _join(self, server: InferenceServer, group: WeightGroup, first_rank: int) -> None:
        if self._former_name:
            await self._leave(server, replace(group, name=self._former_name))
        try:
            with known_form():
                joining = self._adapter.join_group(server.connection, group, first_rank)
                await in_time(joining, self._timeout_s, "group_timeout_s")
            server.group = group
        except FAULTS as error:  # it misses the broadcast, and is synced from a folder
            self._pool.note(server, f"did not join the group of the broadcast: {error}")

    async def _dissolve(self) -> None:
        for task in self._joining:
            task.cancel()
        self._joining = []
        group, self._group = self._group, None
        for server in self._members():
            assert group is not None
            server.group = None
            await self._leave(server, group)

    async def _leave(self, server: InferenceServer, group: WeightGroup) -> None:
        with suppress(*FAULTS):
            await in_time(self._adapter.leave_group(server.connection, group), self._timeout_s, "group_timeout_s")

    def _members(self) -> list[InferenceServer]:
        return [server for server in self._pool.servers.values() if server.group is not None]


def _described(group: WeightGroup, prefixes: Sequence[str], *, is_new: bool) -> BroadcastGroup:
    filled = tuple(prefix.format(group=group.name) for prefix in prefixes)
    return BroadcastGroup(group.name, group.world_size, filled, is_new)
