"""The queue for slots, and the choice of a server for each request."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.interfaces.inference import Grant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_core.inference.pool import ServerPool
    from areal_core.inference.server import InferenceServer
    from areal_core.interfaces.inference import LeaseHolder, SlotRequest

REMEMBERED_PREFIXES = 1 << 16
"""Number of prefixes whose server is remembered. The one that was used longest ago is forgotten first."""


@dataclass(slots=True, eq=False)
class _Lease:
    """A request in the queue, or with a slot of `server`."""

    holder: LeaseHolder
    request: SlotRequest
    server: InferenceServer | None = None


class Router:
    """Leases the slots of servers, continued requests first and then in order of arrival; see `Slots`.

    A request goes to the server that has its prefix, unless that server has much more to do than the least busy one.

    Args:
        pool: the servers.
        limit: number of concurrent requests for one server; None for the number that the server reports.

    Attributes:
        counts: partial generations, those that continued a request, and those that failed, since the last `clear`.
    """

    def __init__(self, pool: ServerPool, limit: int | None) -> None:
        self._pool = pool
        self._limit = limit
        self._server_of_prefix: OrderedDict[str, InferenceServer] = OrderedDict()
        self._leases: dict[LeaseHolder, _Lease] = {}
        self._continued: deque[_Lease] = deque()
        self._new: deque[_Lease] = deque()
        self.counts: Counter[str] = Counter()
        pool.on_change = self.wake
        pool.on_lost = self._lose

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`."""
        lease = self._leases[holder] = _Lease(holder, request)
        queue = self._continued if request.is_continued else self._new
        queue.append(lease)
        self.wake()

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`. After a failure the server is doubted: the lifecycle checks it."""
        lease = self._leases.pop(holder)
        if (server := lease.server) is None:
            return  # `wake` skips it in the queue
        self.counts["servers/partial_generations"] += 1
        self.counts["servers/continued"] += lease.request.is_continued
        if has_failed:
            self.counts["servers/failed"] += 1
            server.doubted.set()
        server.requests -= 1
        server.unresumable -= not lease.request.is_resumable
        self.wake()

    def wake(self) -> None:
        """Give the free slots to waiting requests: first to those that continue a partial generation."""
        for queue in (self._continued, self._new):
            self._serve(queue)

    def _serve(self, queue: deque[_Lease]) -> None:
        failure = self._pool.failure
        skipped = []  # they avoid every server with a free slot
        while queue and (failure is not None or self._with_free_slot(self._pool.ready)):
            lease = queue.popleft()
            if lease.holder not in self._leases:
                continue
            if failure is not None:
                lease.holder.fail(failure)
            elif (server := self._choose(lease.request)) is None:
                skipped.append(lease)
            else:
                server.requests += 1
                server.unresumable += not lease.request.is_resumable
                lease.server = server
                lease.holder.give(self._grant(server))
        queue.extendleft(reversed(skipped))

    def _grant(self, server: InferenceServer) -> Grant:
        assert server.identity is not None
        return Grant(
            server.name,
            server.connection.address,
            server.version,
            server.run_id,
            server.reports_spans,
            server.identity.context,
            self._pool.vocabulary,
            server.adapter.name_of(server.connection),
        )

    def _lose(self, server: InferenceServer) -> None:
        """Tell the holders of a lost server's slots, so that their requests continue elsewhere."""
        for lease in [lease for lease in self._leases.values() if lease.server is server]:
            lease.holder.lose()

    def _slots(self, server: InferenceServer) -> int:
        slots = server.identity.slots if server.identity else 1
        return min(slots, self._limit) if self._limit else slots

    def _with_free_slot(self, servers: Iterable[InferenceServer]) -> list[InferenceServer]:
        # A doubted server is checked first.
        return [server for server in servers if server.requests < self._slots(server) and not server.doubted.is_set()]

    def _choose(self, request: SlotRequest) -> InferenceServer | None:
        ready: Sequence[InferenceServer] = self._pool.ready
        free = self._with_free_slot([server for server in ready if server.name not in request.avoided] or ready)
        if not free:
            return None
        least_busy = min(free, key=lambda server: server.requests / self._slots(server))
        known = (self._server_of_prefix.get(prefix) for prefix in request.prefixes)
        chosen = next((server for server in known if server is not None), least_busy)
        # A cached prefix is worth a quarter of the server's slots, and not a place in a queue.
        margin = 1 + self._slots(chosen) // 4
        if chosen not in free or chosen.requests > least_busy.requests + margin:
            chosen = least_busy
        for prefix in request.prefixes:
            self._server_of_prefix[prefix] = chosen
            self._server_of_prefix.move_to_end(prefix)
        while len(self._server_of_prefix) > REMEMBERED_PREFIXES:
            self._server_of_prefix.popitem(last=False)
        return chosen
