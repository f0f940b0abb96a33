"""Which server is asked next, by whom."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.interfaces import Grant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_core.interfaces import SlotHolder, Want
    from areal_core.servers.pool import Member, ServerPool

REMEMBERED = 1 << 16
"""Prefixes whose server is remembered."""


@dataclass(slots=True, eq=False)
class _Line:
    """Somebody in the line, or with a slot."""

    holder: SlotHolder
    want: Want
    member: Member | None = None


class Router:
    """Gives out the slots of servers: where a prefix lies, else where least is to do; in order of arrival. A `Slots`.

    Args:
        pool: the servers.
        limit: requests that one server is given at once; None for what it says itself.

    Attributes:
        counts: partial generations, those that continued a request, and those that failed, since somebody cleared it.
    """

    def __init__(self, pool: ServerPool, limit: int | None) -> None:
        self._pool = pool
        self._limit = limit
        self._places: OrderedDict[str, Member] = OrderedDict()
        self._known: dict[SlotHolder, _Line] = {}
        self._waiting: deque[_Line] = deque()
        self.counts: Counter[str] = Counter()
        pool.on_change = self.wake
        pool.on_lost = self._lose

    def acquire(self, want: Want, holder: SlotHolder) -> None:
        """See `Slots.acquire`."""
        line = self._known[holder] = _Line(holder, want)
        line_up = self._waiting.appendleft if want.is_continued else self._waiting.append
        line_up(line)
        self.wake()

    def release(self, holder: SlotHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`: a hint to look whether the server still answers, for the worker may be what fails."""
        line = self._known.pop(holder)
        if (member := line.member) is None:
            return  # it is passed over when its turn comes
        self.counts["servers/partial_generations"] += 1
        self.counts["servers/continued"] += line.want.is_continued
        if has_failed:
            self.counts["servers/failed"] += 1
            member.doubted.set()
        member.requests -= 1
        member.uninterrupted -= not line.want.can_go_on
        self.wake()

    def _grant(self, member: Member) -> Grant:
        """A slot of a server, as it is now."""
        assert member.identity is not None
        address, context = member.connection.address, member.identity.context
        name = member.adapter.name_of(member.connection)
        labels = member.version, member.run_id, member.reports_spans
        return Grant(member.name, address, *labels, context, self._pool.vocabulary, name)

    def wake(self) -> None:
        """Give the free slots to those who wait, in the order in which they came."""
        failure = self._pool.failure
        passed = []  # they wait on for a server that they do not avoid
        while self._waiting and (failure is not None or self._free(self._pool.ready)):
            line = self._waiting.popleft()
            if line.holder not in self._known:
                continue
            if failure is not None:
                line.holder.fail(failure)
            elif (member := self._choose(line.want)) is None:
                passed.append(line)
            else:
                member.requests += 1
                member.uninterrupted += not line.want.can_go_on
                line.member = member
                line.holder.give(self._grant(member))
        self._waiting.extendleft(reversed(passed))

    def _lose(self, member: Member) -> None:
        """What was asked of a server that is lost goes on elsewhere."""
        for line in [line for line in self._known.values() if line.member is member]:
            line.holder.lose()

    def _slots(self, member: Member) -> int:
        """Requests that a server is given at once."""
        own = member.identity.slots if member.identity else 1
        return min(own, self._limit) if self._limit else own

    def _free(self, members: Iterable[Member]) -> list[Member]:
        # One that has failed somebody is looked at first.
        return [m for m in members if m.requests < self._slots(m) and not m.doubted.is_set()]

    def _choose(self, want: Want) -> Member | None:
        ready: Sequence[Member] = self._pool.ready
        free = self._free([member for member in ready if member.name not in want.avoided] or ready)
        if not free:
            return None
        least = min(free, key=lambda member: member.requests / self._slots(member))
        chosen = next((self._places[prefix] for prefix in want.prefixes if prefix in self._places), None)
        # A prefix is worth a detour, but not a queue: its server may have a quarter more to do than the idlest one.
        if chosen is None or chosen not in free or chosen.requests > least.requests + 1 + self._slots(chosen) // 4:
            chosen = least
        for prefix in want.prefixes:
            self._places[prefix] = chosen
            self._places.move_to_end(prefix)
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return chosen
