"""Models that the run writes as Hugging Face folders: the best one so far, and the last one.

While an evaluation runs beside training, the weights that it measures are about to change. A *candidate* keeps them
until the score is known: a hidden folder beside `best/`, which then replaces it or is removed. A folder counts only
after the renames of `replacing_folder`, so that a kill at any moment leaves the former best model with its score, or
the new one with its own.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from areal_core.disk import fresh_folder, replacing_folder, settle_folder, tree_size, wait_for_room, writing
from areal_core.training.collectives import broadcast, is_main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.metrics_logger import SilentMetricsLogger

SCORE_FILE = "evaluation.json"
"""File in `best/` with the step and the score that made it the best model."""


def exports_policy(config: RunConfig) -> bool:
    """Return whether a run writes its policy as a Hugging Face folder, at its end or as its best model."""
    return config.checkpoint.export or (config.evaluation is not None and config.evaluation.keep_best)


class Exports:
    """Writes models, the same on every rank. Writing is collective; the main rank renames folders.

    Args:
        run_dir: of the run.
        policy: engine whose weights are written.
        metrics_logger: times the phase `export`.
    """

    def __init__(self, run_dir: Path, policy: TrainEngine, metrics_logger: SilentMetricsLogger) -> None:
        self._run_dir = run_dir
        self._best = run_dir / "best"
        self._policy = policy
        self._metrics_logger = metrics_logger
        self._size = 0  # bytes of the last model that was written
        self._has_candidate = False

    def settle(self) -> float:
        """Repair what a kill has left, and return the score of the best model so far; minus infinity without one."""
        self._has_candidate = False
        score = -math.inf
        if is_main():
            for name in ("best", "model"):
                settle_folder(self._run_dir / name)
            path = self._best / SCORE_FILE
            if path.is_file():
                score = float(json.loads(path.read_text())["evaluation/reward"])
        return broadcast(score)

    def write_model(self, step: int) -> None:
        """Write the current weights as the run's model. Raises `DiskError`."""
        target = self._run_dir / "model"
        with self._exporting(), replacing_folder(_title(step), target, swaps=is_main()) as folder:
            self._export(folder)

    def keep_candidate(self, step: int) -> None:
        """Write the current weights, because they may turn out to be the best. Raises `DiskError`."""
        folder = fresh_folder(self._best)
        with self._exporting(), writing(_title(step), folder):
            try:
                self._export(folder)
            except BaseException:
                self.drop_candidate()
                raise
        self._has_candidate = True

    def write_best(self, step: int, score: float) -> None:
        """Make the candidate the best model; without one, the current weights. Raises `DiskError`.

        Args:
            step: of the weights.
            score: of their evaluation. It is written beside them, so that a resume knows it.
        """
        if not self._has_candidate:
            self.keep_candidate(step)
        self._has_candidate = False
        if is_main():
            with replacing_folder(_title(step), self._best) as folder:
                (folder / SCORE_FILE).write_text(json.dumps({"step": step, "evaluation/reward": score}))

    def drop_candidate(self) -> None:
        """Remove the candidate, if there is one."""
        self._has_candidate = False
        if is_main():
            shutil.rmtree(fresh_folder(self._best), ignore_errors=True)

    @contextmanager
    def _exporting(self) -> Iterator[None]:
        """Wait for room before all ranks write: they write together, and one rank alone cannot retry."""
        if is_main():
            wait_for_room("a model", self._run_dir, self._size, self._metrics_logger.log)
        with self._metrics_logger.phase("export"):
            yield

    def _export(self, folder: Path) -> None:
        self._policy.export(folder)
        if is_main():
            self._size = tree_size(folder)


def _title(step: int) -> str:
    return f"the model of step {step}"
