"""How often a run goes back to its last commit by itself, when a process or a node of it is lost."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from areal_core.errors import LostError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR_S = 3600.0


class Recoveries:
    """How often the run went back to its last commit by itself.

    Args:
        limit: in an hour.
        say: shows a line to the user.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self._limit = limit
        self._say = say
        self._times = deque[float](maxlen=limit)

    def note(self, error: LostError) -> None:
        """Something was lost, and the run goes back; raises the error where that was so too often."""
        now = time.monotonic()
        if not self._limit:
            raise error
        if len(self._times) == self._limit and now - self._times[0] < HOUR_S:
            raise RunError(
                f"{error.message}\nthe run has gone back to its last checkpoint {self._limit} times within an hour",
                hints=(*error.hints, "where that is no fault of its own, raise launcher.recoveries_per_hour"),
            ) from error
        self._times.append(now)
        times = sum(now - then < HOUR_S for then in self._times)
        counted = f"{times} of at most {self._limit} times in an hour"
        self._say(f"{error.message}\ngoing back to the last checkpoint ({counted})")
