"""Models that the run writes as Hugging Face folders: the best one so far, and the last one.

While an evaluation runs beside training the weights that it measures are about to change. A **candidate** holds them
until the score is known: a hidden folder beside `best/`, which takes its place or is removed. Neither counts before the
renames of `replacing_folder`, so that a kill at any moment leaves the former best model, or the new one with its score.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING

from areal_core.disk import fresh_folder, replacing_folder, settle_folder, tree_size, wait_for_room, writing

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.metrics_logger import MetricsLogger

SCORE_FILE = "evaluation.json"
"""Beside the best model: the step and the score that made it the best."""


def exports_policy(config: RunConfig) -> bool:
    """Return whether a run writes its policy as a Hugging Face folder, at its end or as its best model."""
    return config.checkpoint.export or (config.evaluation is not None and config.evaluation.keep_best)


class Exports:
    """The same on every rank; writing is collective, and rank 0 puts folders into their places.

    Args:
        run_dir: of the run.
        policy: whose weights are written.
        metrics_logger: on rank 0.
    """

    def __init__(self, run_dir: Path, policy: TrainEngine, metrics_logger: MetricsLogger | None) -> None:
        self._run_dir = run_dir
        self._best = run_dir / "best"
        self._policy = policy
        self._metrics_logger = metrics_logger
        self._size = 0  # bytes of the last model that was written
        self._has_candidate = False

    def settle(self) -> float:
        """Put right what a kill has left; on rank 0 the score of the best model so far, minus infinity without one."""
        self._has_candidate = False
        if self._metrics_logger is None:
            return -math.inf
        for name in ("best", "model"):
            settle_folder(self._run_dir / name)
        path = self._best / SCORE_FILE
        return float(json.loads(path.read_text())["evaluation/reward"]) if path.is_file() else -math.inf

    def write_model(self, step: int) -> None:
        """Write the weights as they are now as the run's model. Raises `DiskError`."""
        target = self._run_dir / "model"
        with self._writing(step), replacing_folder(self._name(step), target, swaps=self._is_first) as folder:
            self._policy.export(folder)
            self._measure(folder)

    def keep_candidate(self, step: int) -> None:
        """Write the weights as they are now, for the case that they turn out to be the best. Raises `DiskError`."""
        folder = fresh_folder(self._best)
        with self._writing(step), writing(self._name(step), folder):
            try:
                self._policy.export(folder)
            except BaseException:
                self.drop_candidate()
                raise
            self._measure(folder)
        self._has_candidate = True

    def write_best(self, step: int, score: float) -> None:
        """Make the candidate the best model, or the weights as they are now where there is none. Raises `DiskError`.

        Args:
            step: of the weights.
            score: of their evaluation; it is written with them, so that a resume does not forget it.
        """
        if not self._has_candidate:
            self.keep_candidate(step)
        self._has_candidate = False
        if self._is_first:
            with replacing_folder(self._name(step), self._best) as folder:
                (folder / SCORE_FILE).write_text(json.dumps({"step": step, "evaluation/reward": score}))

    def drop_candidate(self) -> None:
        """The candidate, if there is one, is not the best."""
        self._has_candidate = False
        if self._is_first:
            shutil.rmtree(fresh_folder(self._best), ignore_errors=True)

    @property
    def _is_first(self) -> bool:
        return self._metrics_logger is not None

    def _name(self, step: int) -> str:
        return f"the model of step {step}"

    def _writing(self, step: int) -> AbstractContextManager[None]:
        """Before all ranks write together, for they cannot try again one by one; the phase in which they do."""
        if self._metrics_logger is None:
            return nullcontext()
        wait_for_room("a model", self._run_dir, self._size, self._metrics_logger.log)
        return self._metrics_logger.phase("export")

    def _measure(self, folder: Path) -> None:
        if self._is_first:
            self._size = tree_size(folder)
