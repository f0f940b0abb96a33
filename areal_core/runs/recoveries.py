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
        self._step: str | None = None
        self._in_vain = 0

    def note(self, error: LostError, committed: str) -> None:
        """Something was lost, and the run goes back; raises the error where that was so too often.

        Args:
            error: says what.
            committed: the last checkpoint; without a new one it does not help to go back ever again, however slowly.
        """
        now = time.monotonic()
        self._in_vain = self._in_vain + 1 if committed == self._step else 1
        self._step = committed
        if not self._limit:
            raise RunError(error.message, hints=error.hints, exit_code=error.exit_code) from error
        if len(self._times) == self._limit and now - self._times[0] < HOUR_S:
            raise RunError(
                f"{error.message}\nthe run has gone back to its last checkpoint {self._limit} times within an hour",
                hints=(*error.hints, "where that is no fault of its own, raise launcher.recoveries_per_hour"),
            ) from error
        if self._in_vain > self._limit:
            raise RunError(
                f"{error.message}\nthe run has gone back {self._limit} times without coming to a new checkpoint",
                hints=error.hints,
            ) from error
        self._times.append(now)
        times = sum(now - then < HOUR_S for then in self._times)
        counted = f"{times} of at most {self._limit} times in an hour"
        self._say(f"{error.message}\ngoing back to the last checkpoint ({counted})")
