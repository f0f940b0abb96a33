"""How long an episode may take, counted only while it can make progress."""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_Result = TypeVar("_Result")
AGAIN_S = 1.0
"""A cancellation that was swallowed, as `asyncio.wait_for` of Python 3.11 may do, comes again after so long."""


class EpisodeClock:
    """Cancels an episode that takes too long.

    Time goes by only while none of the episode's requests waits for a slot of a server. How long that takes is
    decided by others: those who came before, or servers that are lost. One of several requests is enough: an episode
    that asks for more than there are places at once shall not fail for it. Whoever waits gets its place in turn or is
    failed by the engine; until then a sibling that hangs in its place is not noticed, but then it is. Where the engine
    gives no places at all, the run's `stall_timeout_s` ends it.

    Args:
        limit_s: that the episode may take.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = limit_s
        self._since = 0.0
        self._waiting = 0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_overdue = False

    @property
    def waits(self) -> bool:
        """Whether a request of the episode waits for a place."""
        return self._waiting > 0

    async def run(self, episode: Coroutine[Any, Any, _Result]) -> _Result:
        """What the episode returns; raises what it raises. It has a task of its own, for it may cancel itself.

        Raises:
            TimeoutError: it was cancelled because it took too long.
            asyncio.CancelledError: it was cancelled by somebody else; where the caller was not, by itself.
        """
        self._task = asyncio.ensure_future(episode)
        self._go_on()
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._is_overdue and not was_cancelled():
                raise TimeoutError from None
            raise
        finally:
            self._stop()
            self._task = None

    @contextmanager
    def request(self) -> Iterator[Callable[[bool], None]]:
        """Around a request, which waits where it says so; yields a `GenerationRequest.on_slot`."""
        has_slot = True

        def report(value: bool) -> None:
            nonlocal has_slot
            if value is not has_slot:
                has_slot = value
                self._count(-1 if has_slot else 1)

        try:
            yield report
        finally:
            report(True)

    def _count(self, more: int) -> None:
        waited, self._waiting = self.waits, self._waiting + more
        if self._task is None or self._is_overdue or waited is self.waits:
            return
        if self.waits:
            self._stop()
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._since = self._loop.time()
        if self._left < math.inf:
            self._timer = self._loop.call_later(self._left, self._cancel)

    def _stop(self) -> None:
        self._left -= self._loop.time() - self._since
        if self._timer is not None:
            self._timer.cancel()

    def _cancel(self) -> None:
        assert self._task is not None
        self._is_overdue = True
        self._task.cancel()
        self._timer = self._loop.call_later(AGAIN_S, self._cancel)


def was_cancelled() -> bool:
    """Whether the running task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
