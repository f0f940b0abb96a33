"""The trainer's side of evaluations: when one is due, what waits for it, and which model is the best.

    IDLE ---owe---> DUE ---begin---> RUNNING ---end---> IDLE
                     ^                  |
                     +---Interrupted----+    the parameters are still those of the step

- `owe`: a step's metrics wait for its evaluation. Checkpoints keep them, so that a resume begins the evaluation again.
- `begin`: the servers have the weights of the step and evaluate them, while training takes the next batch.
- `end`: the evaluation has ended before these weights are replaced; its metrics join those of its step.

If the run stops after the next batch was trained on, the evaluated weights no longer exist. The evaluation is given up
then, and the step's metrics are written without it.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING

from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_core.config import RunConfig
    from areal_core.training.exports import Exports
    from areal_core.training.metrics_logger import SilentMetricsLogger
    from areal_core.training.source import SharedSource
    from areal_core.training.state import TrainerState

STOPPING_PATIENCE_S = 15.0
"""Seconds that a stopping run waits for an evaluation which no resume could repeat."""


class EvaluationStatus(Enum):
    """See the module's text."""

    IDLE = auto()
    DUE = auto()
    RUNNING = auto()


class Evaluation:
    """Evaluates the policy, the same on every rank; all methods are collective.

    Args:
        config: of the run.
        state: its `unevaluated` holds the metrics of the step whose evaluation is due or running, its `best` the best
            score.
        source: evaluates the synced weights.
        exports: writes the best model.
        metrics_logger: writes the metrics of the step.

    Attributes:
        status: `DUE` from the start where a checkpoint owes an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainerState,
        source: SharedSource,
        exports: Exports,
        metrics_logger: SilentMetricsLogger,
    ) -> None:
        self._config = config
        self._state = state
        self._source = source
        self._exports = exports
        self._metrics_logger = metrics_logger
        self._step = state.step  # that is evaluated
        self._keeps_best = config.evaluation is not None and config.evaluation.keep_best
        self.status = EvaluationStatus.IDLE if state.unevaluated is None else EvaluationStatus.DUE

    def is_due_after(self, step: int) -> bool:
        """Return whether the weights of a step are to be evaluated."""
        section = self._config.evaluation
        if section is None:
            return False
        return section.at_start if step == 0 else step % section.every == 0 or step == self._config.steps

    def owe(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of the current step until its evaluation has ended."""
        self._step = self._state.step
        self._state.unevaluated = metrics
        self.status = EvaluationStatus.DUE

    def begin(self, *, is_last: bool) -> None:
        """Begin the evaluation that is due. The servers have the weights of the step.

        It runs while the next batch is made and trained on, or has ended on return: after the last step, and where the
        config says so.

        Args:
            is_last: whether nothing is trained after this step.

        Raises:
            Interrupted: as `end`; or the model cannot be exported.
        """
        self.status = EvaluationStatus.RUNNING
        self._source.begin_evaluation()
        if self._config.evaluation is None or not self._config.evaluates_beside_training or is_last:
            self.end()
            return
        self._state.unevaluated = self._metrics_logger.end_step(self._state.unevaluated or {})
        if self._keeps_best and self._step:
            self._export(lambda: self._exports.keep_candidate(self._step))

    def end(self) -> None:
        """Wait for the evaluation that is running, and write its step's metrics.

        Raises:
            Interrupted: the run stops and the evaluation has not ended. It is due again if the step is the current one,
                and given up otherwise.
        """
        if self.status is not EvaluationStatus.RUNNING:
            return
        is_current = self._step == self._state.step
        try:
            with self._metrics_logger.phase("evaluate"):
                measured = self._source.end_evaluation(0.0 if is_current else STOPPING_PATIENCE_S)
        except Interrupted:
            if is_current:
                self.status = EvaluationStatus.DUE
            else:
                self._give_up()
            raise
        score = measured.get("evaluation/reward", -math.inf)
        if is_current:
            self._keep_best(score)  # an export that fails leaves the evaluation due, and a resume repeats it
            self._write({**self._metrics_logger.end_step(self._state.unevaluated or {}), **measured})
        else:
            self._write({**(self._state.unevaluated or {}), **measured})
            self._keep_best(score)
        self._exports.drop_candidate()

    def _keep_best(self, score: float) -> None:
        """Make the evaluated weights the best model if no score was higher."""
        if not self._keeps_best or not score > self._state.best:
            return
        if self._step:  # the weights that the run began with are no model of this run
            self._export(lambda: self._exports.write_best(self._step, score))
        self._state.best = score

    def _give_up(self) -> None:
        self._metrics_logger.log(
            f"the evaluation of step {self._step} was given up: step {self._state.step} has been trained already"
        )
        self._write(self._state.unevaluated or {})
        self._exports.drop_candidate()

    def _write(self, line: Mapping[str, float]) -> None:
        """Write the line of the evaluated step, which no checkpoint needs to keep any more."""
        self._metrics_logger.write_step(self._step, line)
        self._state.unevaluated = None
        self.status = EvaluationStatus.IDLE

    @staticmethod
    def _export(write: Callable[[], None]) -> None:
        """Write a model. Where it cannot be exported, on any rank, the run stops in order and keeps what it trained."""
        try:
            write()
        except DiskError:
            raise
        except RunError as error:
            raise Interrupted(error) from error
