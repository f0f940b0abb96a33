"""How to continue a run that has ended, in words for its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.training.resume_hints import lost_files, resume_hints

if TYPE_CHECKING:
    from areal_core.runtime.folder import RunFolder


def resume_hint(run: RunFolder, *, has_failed: bool) -> str:
    """Return how to continue a run: from its last checkpoint, from an older one, or from the beginning.

    Args:
        run: its folder.
        has_failed: whether it has ended with an error, which the user fixes first.
    """
    newest = max(run.checkpoints(), key=lambda path: (path.name, path), default=None)
    damage = lost_files(newest) if newest is not None else ""
    if newest is not None and damage:
        return f"the checkpoint is damaged: {damage}; {'; '.join(resume_hints(newest))}"
    resume = f"continue with: areal run --resume {run.word}"
    has_trained = newest is not None and int(newest.name.rpartition("-")[2]) > 0
    if has_failed and not has_trained:
        return f"nothing was saved: fix the error and run again (the run folder can be deleted), or {resume}"
    return resume
