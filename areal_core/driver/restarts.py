"""Whether a member that may be replaced is started again, and after which pause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.driver.hub import Process
    from areal_core.messages.hub import Failing

FAILED_STARTS = 3
"""In a row, after which a member that has never come up is given up."""
WINDOW_S = 300.0
PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0


class Restarts:
    """Of all replaced members of a run."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}
        self._failed: dict[str, int] = {}
        self._has_served: set[str] = set()

    def after(self, process: Process, said: Failing | None, how: str) -> tuple[float, str]:
        """A member has ended.

        Args:
            process: that has.
            said: why, in its own words; None where it said nothing.
            how: in words.

        Returns:
            Seconds until it is started again, and a reason to give it up for good, empty where there is none.
        """
        name, now = process.name, time.monotonic()
        if process.is_ready:
            self._failed[name] = 0
            self._has_served.add(name)
            self._ends[name] = [end for end in self._ends.get(name, []) if now - end < WINDOW_S] + [now]
            most = process.group.restarts
            if most is not None and len(self._ends[name]) > most:
                return 0.0, f"ended {len(self._ends[name])} times in {WINDOW_S:g} s; the last time: {how}"
            return PAUSE_S, ""
        self._failed[name] = failed = self._failed.get(name, 0) + 1
        is_new = name not in self._has_served
        if is_new and said is not None and not said.is_loss and not said.is_consequence:
            return 0.0, f"ended before it was ready: {how}"  # what it was given is wrong, and will be again
        if is_new and failed >= FAILED_STARTS:
            return 0.0, f"could not be started {failed} times in a row, the last time: {how}"
        return min(LONGEST_PAUSE_S, PAUSE_S * 5**failed), ""  # one that has served may well serve again
