"""Tracker for Trackio. `trackio show` opens the dashboard on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_trackers.completions import COLUMNS, Completions
from areal_trackers.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_trackers.config import TrackioSettings

NAME_FILE = "trackio_name.txt"
"""File in the run folder with the run's name in Trackio, so that a resumed run continues it."""


class TrackioTracker:
    """A `Tracker` for Trackio that also logs completions.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(self, settings: TrackioSettings) -> None:
        self._settings = settings
        self._library = load_library("trackio")
        self._run: Any = None
        self._completions: Completions | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start Trackio's run, or continue it; see `Tracker.start`."""
        name_file = run_dir / NAME_FILE
        resumed = name_file.exists()
        self._run = self._library.init(
            project=self._settings.project,
            name=name_file.read_text() if resumed else self._settings.name or run_dir.name,
            group=self._settings.group,
            space_id=self._settings.space_id,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        name_file.write_text(self._run.name)
        self._completions = Completions(run_dir, self._settings.completions_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics; see `Tracker.log`."""
        self._run.log(dict(metrics), step=step)

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """Log a table of completions; see `BatchTracker.log_batch`."""
        import pandas as pd

        if self._completions and (rows := self._completions.rows(step, batch)):
            self._run.log({"completions": self._library.Table(dataframe=pd.DataFrame(rows, columns=COLUMNS))}, step)

    def close(self) -> None:
        """Wait until everything is stored, and end Trackio's run; see `Tracker.close`."""
        if self._run is not None:
            self._run.finish()
            self._run = None
