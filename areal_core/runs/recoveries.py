"""How a run goes on, and how often it goes back to its last commit by itself when something of it is lost."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from areal_core.errors import LostError, RunError
from areal_core.training.ways_on import lost_files, ways_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import RunFolder

HOUR_S = 3600.0


def way_on(run: RunFolder, *, has_failed: bool) -> str:
    """How a run that has ended goes on, in words: from its last checkpoint, from an older one, or anew."""
    newest = max(run.checkpoints(), key=lambda path: (path.name, path), default=None)
    if newest is not None and (lost := lost_files(newest)):
        return f"the checkpoint is damaged: {lost}; {'; '.join(ways_on(newest))}"
    anew = "no step is kept yet: mend it and start again with another run_dir or without this one; else "
    has_trained = newest is not None and int(newest.name.rpartition("-")[2])
    return f"{anew if has_failed and not has_trained else ''}go on with: areal run --resume {run.word}"


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
        is_kept = int(committed.rpartition("-")[2] or 0)
        what = "going back to the last checkpoint" if is_kept else "no checkpoint yet: the run begins anew"
        self._say(f"{error.message}\n{what} ({counted})")
