"""Work that must not hold up training: done in order in a thread of its own, and left out where it falls behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from areal_core.background import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

WAITING = 1000
"""Calls that may wait behind one that blocks."""
BEHIND = 8
"""Of these, so many with whole batches may wait."""
PATIENCE_S = 60.0
"""For what waits at the end."""


class Aside:
    """Does what it is given, one thing after another, beside whoever gives it.

    Args:
        log: takes a line for whoever watches the run.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._doing, self._since = "", 0.0
        self._left_out = 0
        self._is_closed = False
        start_thread(self._work, "telling trackers and plugins")

    def do(self, name: str, work: Callable[[], None]) -> None:
        """Have something done; returns at once.

        Args:
            name: who does it, for the words where it blocks.
            work: must not raise.
        """
        with self._changed:
            if len(self._waiting) == WAITING:
                self._left_out += 1
                if self._left_out == 1:
                    self._log(f"{self._blocking()}; what comes meanwhile is left out")
                return
            self._waiting.append((name, work))
            self._changed.notify_all()

    @property
    def is_behind(self) -> bool:
        """Whether several calls wait: what is large is better left out."""
        return len(self._waiting) > BEHIND

    def close(self) -> None:
        """Wait until everything is done, but not for ever: what blocks is named and left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._doing or self._waiting), PATIENCE_S):
                self._log(f"{self._blocking()}; it is left, with {len(self._waiting)} calls behind it")
            self._is_closed = True
            self._changed.notify_all()

    def _blocking(self) -> str:
        return f"{self._doing or 'nobody'} has not come back for {time.monotonic() - self._since:.0f} s"

    def _work(self) -> None:
        while True:
            with self._changed:
                self._doing = ""
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._doing, work = self._waiting.popleft()
                self._since = time.monotonic()
                if self._left_out and not self._waiting:
                    self._log(f"{self._doing} goes on; {self._left_out} calls were left out")
                    self._left_out = 0
            work()
