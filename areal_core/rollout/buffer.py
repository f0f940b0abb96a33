"""Groups between their last episode and the batch that consumes them, in step with the ledger."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from areal_core.disk import PATIENCE_S, RETRY_INTERVAL_S, DiskError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.ledger.groups import PromptGroup
    from areal_core.ledger.store import Ledger

_Result = TypeVar("_Result")


class GroupBuffer:
    """Holds READY groups: those of an earlier attempt first, then by number.

    A group becomes READY once the ledger has written it. A thread writes, so that a slow disk does not block the event
    loop.

    Args:
        ledger: records the state of each group. Memory changes only after the ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._durable: deque[PromptGroup] = deque()  # written by a thread, not yet in the heap
        self._ready: list[tuple[int, int, PromptGroup]] = []  # a heap
        self.refused = ""
        """Error of the last write, which is tried again; empty if the last write succeeded."""

    def __len__(self) -> int:
        """Number of READY groups."""
        return len(self._ready)

    def restore(self, groups: Sequence[PromptGroup]) -> None:
        """Hold the READY groups of an earlier attempt, in the order in which they are to be consumed."""
        self._ready = [(-1, order, group) for order, group in enumerate(groups)]

    def write(self) -> None:
        """Write the ledger's pending records. Called in a thread, by `durably`.

        Raises:
            DiskError: the disk refuses. The records stay pending, and the next call writes them.
        """
        self._durable += self._ledger.flush()

    async def flush(self) -> None:
        """Write the ledger's pending records. The groups that they end are READY afterwards.

        Raises:
            DiskError: the disk refuses for longer than `durably` waits.
        """
        await self.durably(self.write)
        self.collect()

    def collect(self) -> None:
        """Move the groups that `write` has written to the READY ones."""
        while self._durable:
            group = self._durable.popleft()
            heapq.heappush(self._ready, (0, group.number, group))

    async def take(self, size: int, step: int) -> list[PromptGroup]:
        """Remove and return the first `size` groups; the ledger records that the batch of `step` consumes them."""
        groups = [group for _, _, group in heapq.nsmallest(size, self._ready)]
        numbers = [group.number for group in groups]
        await self.durably(lambda: self._ledger.consumed(numbers, step))
        taken = set(numbers)
        self._keep(lambda group: group.number not in taken)
        return groups

    def drop_stale(self, synced: Mapping[int, int], step: int, bound: int) -> list[PromptGroup]:
        """Remove and return the groups that are too stale for the batch of `step`.

        Args:
            synced: weight version -> number of batches trained when it was synced.
            step: number of batches trained before that batch.
            bound: on the staleness of a group's oldest token, in batches.
        """
        over = sorted(one for one in self._ready if one[2].staleness(synced, step) > bound)
        stale = [group for _, _, group in over]
        if stale:
            self._keep(lambda group: group not in stale)
        return stale

    async def durably(self, write: Callable[[], _Result]) -> _Result:
        """Return the result of `write`, called in a thread. While the disk refuses it is called again, for PATIENCE_S.

        Raises:
            DiskError: the disk still refuses after that.
        """
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                result = await asyncio.to_thread(write)
            except DiskError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                self.refused = error.message
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                self.refused = ""
                return result

    def _keep(self, is_kept: Callable[[PromptGroup], bool]) -> None:
        self._ready = [item for item in self._ready if is_kept(item[2])]
        heapq.heapify(self._ready)
