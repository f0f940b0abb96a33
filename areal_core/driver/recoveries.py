"""How a run goes on, and how often it goes back to its last commit by itself when something of it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import LostError, RunError
from areal_core.training.resume_hints import lost_files, resume_hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import RunFolder


def resume_hint(run: RunFolder, *, has_failed: bool) -> str:
    """How a run that has ended goes on, in words: from its last checkpoint, from an older one, or anew."""
    newest = max(run.checkpoints(), key=lambda path: (path.name, path), default=None)
    if newest is not None and (lost := lost_files(newest)):
        return f"the checkpoint is damaged: {lost}; {'; '.join(resume_hints(newest))}"
    anew = "nothing was saved: fix the error and run again (the run folder can be deleted), or "
    has_trained = newest is not None and int(newest.name.rpartition("-")[2])
    return f"{anew if has_failed and not has_trained else ''}continue with: areal run --resume {run.word}"


class Recoveries:
    """How often the run went back to its last commit by itself without coming to a new one.

    Args:
        limit: of such attempts.
        log: shows a line to the user.
    """

    def __init__(self, limit: int, log: Callable[[str], None]) -> None:
        self._limit = limit
        self._log = log
        self._step: str | None = None
        self._in_vain = 0

    def note(self, error: LostError, committed: str) -> None:
        """Something was lost, and the run goes back; raises the error where that was in vain too often.

        Args:
            error: says what.
            committed: the last checkpoint; empty for none.
        """
        self._in_vain = self._in_vain + 1 if committed == self._step else 1
        self._step = committed
        if not self._limit:
            raise RunError(error.message, hints=error.hints, exit_code=error.exit_code) from error
        if self._in_vain > self._limit:
            raise RunError(
                f"{error.message}\nthe run went back {self._limit} times without reaching a new checkpoint",
                hints=(*error.hints, "or raise launcher.max_attempts_without_checkpoint"),
            ) from error
        is_kept = int(committed.rpartition("-")[2] or 0)
        what = "going back to the last checkpoint" if is_kept else "no checkpoint yet: the run starts over"
        self._log(f"{error.message}\n{what} ({self._in_vain} of at most {self._limit} times without a new one)")
