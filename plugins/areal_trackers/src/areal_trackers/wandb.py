"""Tracker for Weights & Biases."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from areal_trackers.completions import COLUMNS, Completions
from areal_trackers.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_trackers.config import WandbSettings

IDENTITY_FILE = "wandb_id.txt"
"""File in the run folder with the id of wandb's run, so that a resumed run continues it."""


class WandbTracker:
    """A `Tracker` for Weights & Biases that also logs completions.

    Steps are logged as a metric: wandb drops values of a step that it has passed, and a resumed run repeats some steps.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._library = load_library("wandb")
        self._run: Any = None
        self._completions: Completions | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start wandb's run, or continue it; see `Tracker.start`."""
        identity = run_dir / IDENTITY_FILE
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        settings = self._settings
        self._run = self._library.init(
            project=settings.project,
            name=settings.name or run_dir.name,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            dir=str(run_dir),
            config=dict(config),
            id=identity.read_text(),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._completions = Completions(run_dir, settings.completions_every)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics; see `Tracker.log`."""
        self._run.log({**metrics, "step": step})

    def log_batch(self, step: int, batch: PackedBatch) -> None:
        """Log a table of completions; see `BatchTracker.log_batch`."""
        if self._completions and (rows := self._completions.rows(step, batch)):
            table = self._library.Table(columns=list(COLUMNS), data=rows)
            self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        """End wandb's run; see `Tracker.close`."""
        if self._run is not None:
            self._run.finish()
            self._run = None
