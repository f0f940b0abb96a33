"""Metrics and completions for MLflow: on a tracking server."""

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
"""In the run folder: by it a resumed run goes on as the same run."""


class MLflowTracker:
    """A `Tracker` that takes completions as well.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, settings: MLflowSettings) -> None:
        self._settings = settings
        self._library = load_library("mlflow")
        self._run_id: str | None = None
        self._completions: Completions | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """See `Tracker.start`."""
        settings, identity = self._settings, run_dir / IDENTITY_FILE
        if settings.uri is not None:
            self._library.set_tracking_uri(settings.uri)
        self._library.set_experiment(settings.experiment)
        known = identity.read_text() if identity.exists() else None
        self._run_id = self._library.start_run(known, run_name=settings.name or run_dir.name).info.run_id
        identity.write_text(self._run_id)
        self._library.log_dict(dict(config), "config.yaml")
        self._completions = Completions(run_dir, settings.completions_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`. MLflow takes no brackets in names, and no infinite numbers."""
        finite = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items() if math.isfinite(value)}
        self._library.log_metrics(finite, step=step, run_id=self._run_id)

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """See `BatchTracker.log_batch`. A file a step: `log_table` would fetch and send all former rows each time."""
        if self._completions and (rows := self._completions.rows(step, batch)):
            table = {"columns": list(COLUMNS), "data": rows}
            self._library.log_dict(table, f"completions/step-{step:06d}.json", run_id=self._run_id)

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._run_id is not None:
            self._library.end_run()
            self._run_id = None
