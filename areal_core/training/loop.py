"""The training loop. Every rank of the trainer runs it in step with the others (SPMD); begin to read at `Trainer.run`.

    wait ──► sleep ──► train ──► evaluate ──► weight_sync ──► logprob_check ──► hooks ──► export ──► checkpoint

    phase          what a step does in it                              what it waits for
    wait           takes the batch of the step                         batch_size READY groups of the rollout controller
    sleep          colocated only: lets servers release their memory   the servers
    train          forward passes, advantages, optimizer updates       nothing outside of the trainer
    evaluate       ends the evaluation that ran beside it              the last episode of the evaluation
    weight_sync    sends the weights under a new version               the sync before; of a transport, this one too
    logprob_check  compares log-probabilities, every few syncs         the servers' answers to fixed prompts
    hooks          lets plugins add metrics and stop the run           the plugins
    export         keeps weights that may turn out to be the best      the disk
    checkpoint     copies parameters, which a thread then writes       the thread that writes the checkpoint before

Each phase is also a metric, `time/<phase>_s`. A phase that is not due is left out. In `hooks` the step's metrics are
written; then the evaluation that is due begins. It runs while the next batch is taken and trained on;
`evaluation.py` has the map of its states. `areal_core/rollout/controller.py` has the map of a group's states: it
makes the next batches while this loop trains.

After each step the ranks agree whether a plugin has stopped the run (`areal_should_stop`): the main rank asks the
plugins, and broadcasts their reason. The run then ends as it does after its last step.

A run that is asked to stop from outside, or whose rollouts fail, raises `Interrupted` on all ranks at the same point,
where the parameters are sound: in `wait`, `evaluate` or `export`. A last checkpoint is committed then.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from areal_core.disk import DiskError
from areal_core.runtime.rpc import PeerClosed
from areal_core.training.checkpointer import Checkpointer
from areal_core.training.collectives import broadcast_text
from areal_core.training.evaluation import Evaluation, EvaluationStatus
from areal_core.training.exports import Exports
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.training.learner import Learner
    from areal_core.training.metrics_logger import SilentMetricsLogger
    from areal_core.training.source import SharedSource, TrainingBatch
    from areal_core.training.state import TrainerState
    from areal_core.training.weight_sync import WeightSync


class Trainer:
    """Learns from batches and syncs weights, the same on every rank.

    Args:
        config: of the run.
        learner: trains on a batch.
        weight_sync: syncs weights to the servers; None if the run generates nothing.
        run_dir: folder of the run, for exported models.
        checkpoints: folder of this attempt's checkpoints.
        source: of batches.
        metrics_logger: times phases and reports metrics.
        state: of the checkpoint that the run begins from.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        weight_sync: WeightSync | None,
        run_dir: Path,
        checkpoints: Path,
        source: SharedSource,
        metrics_logger: SilentMetricsLogger,
        state: TrainerState,
    ) -> None:
        self._config = config
        self._learner = learner
        self._weight_sync = weight_sync
        self._source = source
        self._metrics_logger = metrics_logger
        self._phase = metrics_logger.phase
        self._state = state
        self._stop_reason = ""  # the same on all ranks
        self._exports = Exports(run_dir, learner.policy, metrics_logger)
        self._evaluation = Evaluation(config, state, source, self._exports, metrics_logger)
        self._checkpointer = Checkpointer(
            config.checkpoint, run_dir, checkpoints, learner.changing, source, metrics_logger
        )

    def run(self, version: int) -> bool:
        """Train to the last step, or until a plugin stops the run.

        Args:
            version: weight version to sync first; 0 if the servers have loaded the same weights already.

        Returns:
            True if all steps are done or a plugin has stopped the run, False if the run was interrupted. A checkpoint
            is committed in all cases.

        Raises:
            RunError: a part of the run failed, or gradients stayed non-finite. If the rollouts failed while the
                trainer waited for a batch or an evaluation, a checkpoint was committed before.
        """
        state = self._state
        self._checkpointer.latest = state.step
        state.best = max(state.best, self._exports.settle())
        try:
            self._begin(version)
            while not self._is_over():
                with self._phase("wait"):
                    batch = self._next_batch()
                if self._config.takes_turns and self._weight_sync is not None:
                    with self._phase("sleep"):
                        self._weight_sync.sleep()
                with self._phase("train"):
                    metrics = self._learn(batch)
                state.step += 1
                self._end_evaluation(metrics)
                metrics |= self._sync()
                self._checkpointer.poll()
                self._report(metrics)
                self._agree_to_stop()
                self._begin_evaluation()
                if self._checkpointer.is_due(state.step):
                    self._checkpointer.save(state, is_last=self._is_over())
        except Interrupted as interruption:
            self._save_interrupted(interruption)
            return False
        except (PeerClosed, DiskError):  # no checkpoint can be committed
            raise
        except Exception:
            with suppress(Exception):  # the error of training is the one to report
                self._checkpointer.finish()  # a snapshot from before the error is sound
            raise
        finally:
            self._exports.drop_candidate()
        self._checkpointer.save(state, is_last=True)
        if self._stop_reason:
            self._metrics_logger.note(state.step, f"the run stopped before its last step: {self._stop_reason}")
        if self._config.checkpoint.export:
            self._exports.write_model(state.step)
        return True

    def _begin(self, version: int) -> None:
        """Sync the first weights, and begin the evaluation that the checkpoint owes, or the one at the start."""
        if self._weight_sync is not None:
            with self._phase("weight_sync"):
                self._weight_sync.begin(version, self._state.step)
        if self._state.step == 0 and self._evaluation.is_due_after(0):
            self._evaluation.owe({})
        self._begin_evaluation()

    def _is_over(self) -> bool:
        """Return whether the current step is the run's last one."""
        return bool(self._stop_reason) or self._state.step >= self._config.steps

    def _agree_to_stop(self) -> None:
        """Let all ranks know whether a plugin stops the run after the current step. Collective."""
        self._stop_reason = broadcast_text(self._metrics_logger.stop_reason)

    def _next_batch(self) -> TrainingBatch:
        """Wait for the next batch. Meanwhile offer a folder to servers that missed the last weight sync."""
        while (batch := self._source.next_batch(self._state.step)) is None:
            assert self._weight_sync is not None
            self._weight_sync.offer_folder()
        return batch

    def _learn(self, batch: TrainingBatch) -> dict[str, float]:
        self._state.steps.append(batch.groups)
        metrics = dict(batch.metrics)
        if batch.batch is not None:
            version = 0 if self._weight_sync is None else self._weight_sync.version
            metrics |= self._learner.learn(batch.batch, self._state.step, version, self._state.algorithm)
            self._metrics_logger.batch_logged(self._state.step + 1, self._learner.logged)
        return metrics

    def _end_evaluation(self, metrics: dict[str, float]) -> None:
        """End the evaluation that ran while the step was trained, before its weights are replaced.

        Raises:
            Interrupted: the run stops; the step, with these metrics, is complete nevertheless.
        """
        if self._evaluation.status is not EvaluationStatus.RUNNING:
            return
        self._checkpointer.poll()  # a checkpoint that is complete need not wait for the evaluation
        try:
            self._evaluation.end()
        except Interrupted:
            self._report(metrics)
            raise

    def _sync(self) -> dict[str, float]:
        if self._weight_sync is None:
            return {}
        step = self._state.step
        with self._phase("weight_sync"):
            if not self._learner.has_learned and not self._config.takes_turns:
                self._weight_sync.skip(step)
                return {"version": float(self._weight_sync.version)}
            if self._config.takes_turns:
                torch.cuda.empty_cache()  # the servers take their memory back with this weight sync
            version = self._weight_sync.sync(step)
            self._learner.has_learned = False
            self._metrics_logger.weights_synced(step, version)
        with self._phase("logprob_check"):
            differences = self._weight_sync.check_logprobs(self._config.model.dtype)
        return {**differences, "version": float(version)}

    def _report(self, metrics: dict[str, float]) -> None:
        """Write the step's metrics, or keep them if the step is to be evaluated."""
        if self._evaluation.is_due_after(self._state.step):
            self._evaluation.owe(metrics)
        else:
            self._metrics_logger.finish_step(self._state.step, metrics)

    def _begin_evaluation(self) -> None:
        """Begin the evaluation that is due, if one is, once the servers have the weights."""
        if self._evaluation.status is not EvaluationStatus.DUE:
            return
        if self._weight_sync is not None:
            with self._phase("weight_sync"):
                self._weight_sync.finish()
        self._evaluation.begin(is_last=self._is_over())
        self._agree_to_stop()  # plugins may have seen its metrics already

    def _save_interrupted(self, interruption: Interrupted) -> None:
        """Commit the last checkpoint of an interrupted run.

        Raises:
            RunError: what interrupted it, if that was a failure.
        """
        failure = interruption.failure
        try:
            self._checkpointer.save(self._state, is_last=True)
        except Exception as error:
            if failure is not None:  # the first cause is the one to report
                raise failure from error
            raise
        if failure is not None:
            raise failure from None
