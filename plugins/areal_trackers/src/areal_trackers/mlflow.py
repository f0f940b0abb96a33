"""Tracker for MLflow: metrics and completions on a tracking server."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from areal_trackers.completions import COLUMNS, Completions
from areal_trackers.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_trackers.config import MLflowSettings

IDENTITY_FILE = "mlflow_id.txt"
"""File in the run folder with the id of MLflow's run, so that a resumed run continues it."""


class MLflowTracker:
    """A `Tracker` for MLflow that also logs completions.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, settings: MLflowSettings) -> None:
        self._settings = settings
        self._library = load_library("mlflow")
        self._run_id: str | None = None
        self._completions: Completions | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start MLflow's run, or continue it; see `Tracker.start`."""
        settings, identity = self._settings, run_dir / IDENTITY_FILE
        if settings.uri is not None:
            self._library.set_tracking_uri(settings.uri)
        self._library.set_experiment(settings.experiment)
        run_id = identity.read_text() if identity.exists() else None
        self._run_id = self._library.start_run(run_id, run_name=settings.name or run_dir.name).info.run_id
        identity.write_text(self._run_id)
        self._library.log_dict(dict(config), "config.yaml")
        self._completions = Completions(run_dir, settings.completions_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics; see `Tracker.log`. MLflow allows no brackets in names and no infinite numbers."""
        finite = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items() if math.isfinite(value)}
        self._library.log_metrics(finite, step=step, run_id=self._run_id)

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """Log completions as one file per step. `log_table` would fetch and send all earlier rows each time."""
        if self._completions and (rows := self._completions.rows(step, batch)):
            table = {"columns": list(COLUMNS), "data": rows}
            self._library.log_dict(table, f"completions/step-{step:06d}.json", run_id=self._run_id)

    def close(self) -> None:
        """End MLflow's run; see `Tracker.close`."""
        if self._run_id is not None:
            self._library.end_run()
            self._run_id = None
