"""Disk space for what a run keeps. A checkpoint or export that does not fit would lose what was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from areal_core.disk import free_bytes, in_mebibytes, tree_size
from areal_core.runtime.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig

_REPLACED: Final = ("attempts/*/checkpoints", "best", "model")
"""What a resumed run has written before, and replaces."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Bytes that a run needs on its disk, and bytes that are free.

    Attributes:
        checkpoint: size of one checkpoint; 0 if it is not known.
        model: size of one exported model.
        least: largest disk use of an uninterrupted run, including what earlier attempts wrote.
        most: the same with as many checkpoints as are kept, and while a new best model is written.
        free: free bytes, and those of what a resumed run replaces.
    """

    checkpoint: int
    model: int
    least: int
    most: int
    free: int

    @property
    def row(self) -> str:
        """Text for the plan."""
        return f"{self._sizes}; at most {in_mebibytes(self.most)} in all, and {in_mebibytes(self.free)} are free"

    @property
    def problem(self) -> str:
        """Why the run cannot save what it trains; empty if it can."""
        if self.least <= self.free:
            return ""
        return (
            f"run_dir: the run needs {in_mebibytes(self.least)}, and its disk has {in_mebibytes(self.free)} free: "
            f"{self._sizes}. Make room, choose another run_dir, or see checkpoint.every, checkpoint.keep and "
            "checkpoint.export"
        )

    @property
    def note(self) -> str:
        """A warning if the run may fill the disk; empty if it cannot."""
        if self.problem or self.most <= self.free:
            return ""
        return f"the disk may become full: {self.row}; see checkpoint.keep"

    @property
    def _sizes(self) -> str:
        checkpoint = f"a checkpoint takes {in_mebibytes(self.checkpoint)}, " if self.checkpoint else ""
        return f"{checkpoint}an exported model {in_mebibytes(self.model)}"


def disk_space(config: RunConfig, run_dir: Path, checkpoint: int, model: int) -> DiskSpace:
    """Compare what a run will write with what is free.

    Args:
        config: of the run.
        run_dir: its folder, which need not exist yet.
        checkpoint: bytes of a checkpoint; 0 if they are not known.
        model: bytes of an exported model.
    """
    section, keeps_best = config.checkpoint, config.evaluation is not None and config.evaluation.keep_best
    run = RunFolder(run_dir)
    present = len(run.checkpoints())
    to_come = _checkpoints_after(run.last_step or 0, config)

    def peak(checkpoints: int) -> int:
        """Return the bytes on the disk when the last checkpoint is written, or the export after it, if that is more."""
        writing = min(checkpoints, section.keep + 1)  # a new checkpoint is written before the oldest is removed
        return max(writing * checkpoint, min(checkpoints, section.keep) * checkpoint + section.export * model)

    least = peak(present + to_come) + keeps_best * model
    most = peak(section.keep + 1) + 2 * keeps_best * model  # a new best model is written beside the former one
    replaced = sum(tree_size(folder) for pattern in _REPLACED for folder in run_dir.glob(pattern))
    return DiskSpace(checkpoint, model, least, max(least, most), free_bytes(run_dir) + replaced)


def _checkpoints_after(step: int, config: RunConfig) -> int:
    """Return how many checkpoints by steps follow that of a committed step. The last step has one."""
    if step >= config.steps:
        return 0
    every = config.checkpoint.every or config.steps
    return -(-config.steps // every) - step // every
