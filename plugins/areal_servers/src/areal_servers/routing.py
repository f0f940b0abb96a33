"""Which server works on which request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from areal_servers.member import State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from areal_core.errors import RunError
    from areal_servers.member import Member

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
        self._waiting: deque[tuple[asyncio.Future[Member], str, Collection[Member]]] = deque()
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

    async def take(self, affinity: str, avoided: Collection[Member] = (), *, is_continued: bool = False) -> Member:
        """A place on a server; `release` gives it back.

        Args:
            affinity: requests of the same one go to the same server where that is no detour.
            avoided: servers that are given this request only where no other is ready.
            is_continued: the request had a place before, and so came before all who wait.

        Raises:
            RunError: what `fail` said.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
            waiting = (place, affinity, avoided)
            if is_continued:
                self._waiting.appendleft(waiting)
            else:
                self._waiting.append(waiting)
            self.wake()
            try:
                member = await place
            except asyncio.CancelledError:
                # A place that was given to a request that no longer wants it goes to the next one.
                if place.done() and not place.cancelled() and place.exception() is None:
                    self.release(place.result())
                raise
            if member.state is State.READY:
                return member
            self.release(member)  # it was stopped or lost before the request came to know of its place
            is_continued = True

    def release(self, member: Member) -> None:
        """A request has left a server."""
        member.release()
        self.wake()

    def wake(self) -> None:
        """Give the free places to those who wait, in the order in which they came."""
        passed = []  # they wait on for a server that they do not avoid
        while self._waiting and (self._failure is not None or self._free(self.ready)):
            place, affinity, avoided = self._waiting.popleft()
            if place.done():
                continue
            if self._failure is not None:
                place.set_exception(self._failure)
                continue
            member = self._choose(affinity, avoided)
            if member is None:
                passed.append((place, affinity, avoided))
            else:
                member.take()
                place.set_result(member)
        self._waiting.extendleft(reversed(passed))

    def fail(self, failure: RunError) -> None:
        """End every wait, now and in future."""
        self._failure = failure
        self.wake()

    def _free(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if member.requests < self.slots(member)]

    def _choose(self, affinity: str, avoided: Collection[Member]) -> Member | None:
        ready = self.ready
        free = self._free([member for member in ready if member not in avoided] or ready)
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
