"""Trackers: destinations of metrics besides the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch


class Tracker(Protocol):
    """Receives the metrics of each step.

    Each tracker is called in a thread of its own. The first exception is logged and switches the tracker off; the run
    continues. While a tracker blocks, at most 1000 calls wait for it, and older ones are dropped.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.sdk import Tracker
        >>> class RewardFile:
        ...     def start(self, run_dir, config):
        ...         self.file = (run_dir / "rewards.csv").open("a")
        ...
        ...     def log(self, step, metrics):
        ...         print(step, metrics.get("reward/mean"), sep=",", file=self.file)
        ...
        ...     def close(self):
        ...         self.file.close()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tracker: Tracker = RewardFile()
        ...     tracker.start(Path(folder), {"steps": 100})
        ...     tracker.log(1, {"reward/mean": 0.25})
        ...     tracker.close()
        ...     (Path(folder) / "rewards.csv").read_text().splitlines()
        ['1,0.25']
    """

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Called once, before the first step; `config` holds no secrets."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called once for each step."""

    def close(self) -> None:
        """Flush and end. Always called at the end of a run, also after an exception."""


@runtime_checkable
class BatchTracker(Tracker, Protocol):
    """A tracker that also receives sequences of each batch."""

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """Called once for each step: a few groups of its batch, as the hook `areal_batch_logged` gives them."""
