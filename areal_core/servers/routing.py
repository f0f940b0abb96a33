"""Which server works on which request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from areal_core.servers.member import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.errors import RunError
    from areal_core.servers.member import Member

REMEMBERED = 1 << 16
"""Prefixes whose server is remembered."""


class Router:
    """Gives each request a place on a server: where its prefix lies, else where least is to do; in order of arrival.

    Args:
        limit: requests that one server is given at once; None for what it says itself.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._members: dict[str, Member] = {}
        self._places: OrderedDict[str, Member] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._failure: RunError | None = None

    def set_members(self, members: Iterable[Member]) -> None:
        """These are the servers from now on."""
        self._members = {member.name: member for member in members}

    def slots(self, member: Member) -> int:
        """Requests that a server is given at once."""
        own = member.identity.slots if member.identity else 1
        return min(own, self._limit) if self._limit else own

    @property
    def ready(self) -> list[Member]:
        """The servers that may be given requests."""
        return [member for member in self._members.values() if member.state is State.READY]

    async def take(self, affinity: str) -> Member:
        """A place on a server; `release` gives it back.

        Raises:
            RunError: what `fail` said.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            member = self._choose(affinity)
            if member is not None:
                member.take()
                return member
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                # A place that was offered to a request that no longer wants it goes to the next one.
                if place.done() and not place.cancelled():
                    self.wake(1)
                raise

    def release(self, member: Member) -> None:
        """A request has left a server."""
        member.release()
        self.wake(1)

    def wake(self, count: int | None = None) -> None:
        """Let so many waiting requests look again; all of them where no number is given."""
        while self._waiting and (count is None or count > 0):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                count = None if count is None else count - 1

    def fail(self, failure: RunError) -> None:
        """End every wait, now and in future."""
        self._failure = failure
        self.wake()

    def _choose(self, affinity: str) -> Member | None:
        free = [member for member in self.ready if member.requests < self.slots(member)]
        if not free:
            return None
        least = min(free, key=lambda member: member.requests / self.slots(member))
        chosen = self._places.get(affinity) if affinity else None
        # A prefix is worth a detour, but not a queue: its server may have a quarter more to do than the idlest one.
        if chosen is None or chosen not in free or chosen.requests > least.requests + 1 + self.slots(chosen) // 4:
            chosen = least
        if affinity:
            self._places[affinity] = chosen
            self._places.move_to_end(affinity)
            if len(self._places) > REMEMBERED:
                self._places.popitem(last=False)
        return chosen
