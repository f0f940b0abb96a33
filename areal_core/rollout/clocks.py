"""How long an episode may take, counted only while it can make progress; how long batches are in generation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_Result = TypeVar("_Result")
AGAIN_S = 1.0
"""Seconds after which an episode that still runs is cancelled again: `asyncio.wait_for` of Python 3.11 may swallow a
cancellation."""


class GenerationClock:
    """Measures how long batches are in generation, and for how long none is. Made in a running event loop."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._measured_at = self._now()
        self._running: Counter[int] = Counter()  # groups by the batch that they were admitted for
        self._idle_s = self._batches_s = 0.0

    def started(self, batch: int) -> None:
        """Count a group of a batch as running."""
        self._measure()
        self._running[batch] += 1

    def ended(self, batch: int) -> None:
        """Count a group of a batch as ended."""
        self._measure()
        self._running[batch] -= 1
        if not self._running[batch]:
            del self._running[batch]

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call: two batches that are in generation at a time count both."""
        self._measure()
        metrics = {"time/generation_idle_s": self._idle_s, "time/batch_generation_s": self._batches_s}
        self._idle_s = self._batches_s = 0.0
        return metrics

    def _measure(self) -> None:
        """Add the time since the last change."""
        now = self._now()
        seconds, self._measured_at = now - self._measured_at, now
        self._batches_s += seconds * len(self._running)
        self._idle_s += 0.0 if self._running else seconds


class EpisodeClock:
    """Cancels an episode that takes too long.

    The clock stops while any request of the episode waits for a slot of a server: earlier requests and lost servers
    decide how long that takes. So an episode with more concurrent requests than there are slots does not fail for it.
    Each waiting request gets its slot in turn, or the engine fails it; a request that hangs in its slot meanwhile is
    noticed afterwards. If the engine gives no slots at all, `rollout.stall_timeout_s` ends the run.

    Args:
        limit_s: seconds that the episode may take.
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
        """Whether a request of the episode waits for a slot."""
        return self._waiting > 0

    async def run(self, episode: Coroutine[Any, Any, _Result]) -> _Result:
        """Return what the episode returns, and raise what it raises.

        The episode runs in a task of its own, because it may cancel its task.

        Raises:
            TimeoutError: it was cancelled because it took too long.
            asyncio.CancelledError: the caller was cancelled, or the episode cancelled its task.
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
        """Enclose a request. Yields its `GenerationRequest.on_slot_change`, which stops the clock while it waits."""
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
    """Return whether the running task has been cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
