"""Finished groups between their last episode and the batch that consumes them, in step with the ledger."""

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
    """Groups are handed out once the ledger has them, the resumed ones first, then by number.

    A thread writes to the ledger, so that a slow disk does not block the event loop.

    Args:
        ledger: records what becomes of each group; memory changes only after it has.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._durable: deque[PromptGroup] = deque()  # written by a thread, not yet in the heap
        self._ready: list[tuple[int, int, PromptGroup]] = []  # a heap
        self.refused = ""
        """What the disk says that cannot be written now; empty where it can."""

    def __len__(self) -> int:
        """Groups that can be handed out."""
        return len(self._ready)

    def restore(self, groups: Sequence[PromptGroup]) -> None:
        """Take up groups that the ledger of an earlier process has, in the order in which they are to be consumed."""
        self._ready = [(-1, order, group) for order, group in enumerate(groups)]

    def write(self) -> None:
        """Make everything durable that the ledger holds back. `durably` has a thread call it.

        Raises:
            DiskError: nothing is lost; the next call writes it.
        """
        self._durable += self._ledger.flush()

    async def flush(self) -> None:
        """Make everything durable that the ledger holds back; finished groups can be handed out then.

        Raises:
            DiskError: the disk refuses, for longer than `durably` waits.
        """
        await self.durably(self.write)
        self.collect()

    def collect(self) -> None:
        """Hand out the groups that `write` has made durable."""
        while self._durable:
            group = self._durable.popleft()
            heapq.heappush(self._ready, (0, group.number, group))

    async def take(self, size: int, step: int) -> list[PromptGroup]:
        """The first `size` groups, consumed by the batch of `step`."""
        groups = [group for _, _, group in heapq.nsmallest(size, self._ready)]
        numbers = [group.number for group in groups]
        await self.durably(lambda: self._ledger.consumed(numbers, step))
        taken = set(numbers)
        self._keep(lambda group: group.number not in taken)
        return groups

    def drop_stale(self, synced: Mapping[int, int], step: int, bound: int) -> list[PromptGroup]:
        """Leave out groups that the batch of `step` may not consume, and return them.

        Args:
            synced: for each weight version the batches trained when it was synced.
            step: batches trained before the one that would consume them.
            bound: on the staleness of a group's oldest token.
        """
        over = sorted(one for one in self._ready if one[2].staleness(synced, step) > bound)
        stale = [group for _, _, group in over]
        if stale:
            self._keep(lambda group: group not in stale)
        return stale

    async def durably(self, write: Callable[[], _Result]) -> _Result:
        """Write to the ledger in a thread, again and again for a while where the disk refuses.

        Raises:
            DiskError: it still does.
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
