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
"""A call with a whole batch is dropped if more than this many calls wait."""
PATIENCE_S = 60.0
"""Time for the calls that wait at the end."""


class Aside:
    """Calls one tracker, or the hooks, in a thread beside training. The first exception switches it off.

    Args:
        name: of what is called, for the log.
        log: takes a line for whoever watches the run.
    """

    def __init__(self, name: str, log: Callable[[str], None]) -> None:
        self._name, self._log = name, log
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_calling, self._since = False, 0.0
        self._left_out = 0
        self._is_ending = self._is_off = False
        start_thread(self._work, f"calls of {name}")

    def do(self, work: Callable[[], None], *, is_large: bool = False) -> None:
        """Queue a call and return.

        Args:
            work: does it.
            is_large: whether it holds a whole batch; see `BEHIND`.
        """
        with self._changed:
            if self._is_off:
                return
            if len(self._waiting) >= WAITING:
                self._left_out += 1
                if self._left_out == 1:
                    self._log(f"{self._blocking()}; dropping new calls until it returns")
            elif not is_large or len(self._waiting) <= BEHIND:
                self._waiting.append(work)
                self._changed.notify_all()

    def end(self, last: Callable[[], None]) -> None:
        """Queue the last call, however many wait, and return."""
        with self._changed:
            if not self._is_off:
                self._waiting.append(last)
            self._is_ending = True
            self._changed.notify_all()

    def wait(self, deadline: float) -> None:
        """Wait until everything is done, or until this time of `time.monotonic`, when the log names what blocks."""
        with self._changed:
            remaining = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: not (self._is_calling or self._waiting), remaining):
                self._log(f"{self._blocking()}; dropping {len(self._waiting)} queued calls")

    def _blocking(self) -> str:
        return f"{self._name} has blocked for {time.monotonic() - self._since:.0f} s"

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_calling = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                self._is_calling, self._since = True, time.monotonic()
                if self._left_out and not self._waiting:
                    self._log(f"{self._name} responds again; {self._left_out} calls were dropped")
                    self._left_out = 0
            try:
                work()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker must never end a run
                self._log(f"{self._name} is switched off: {type(error).__name__}: {error}")
                with self._changed:
                    self._is_off = True
                    self._waiting.clear()
