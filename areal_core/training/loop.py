"""The training loop. `Trainer.run` is the page to read: wait, learn, sync, look after, once for every step."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.messages import PeerClosed
from areal_core.training.checkpoint import ConsumptionLog
from areal_core.training.checkpointer import Checkpointer
from areal_core.training.distribution import agree, share_or_stop
from areal_core.training.exports import Exports
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.data import PackedBatch
    from areal_core.training.learner import Learner
    from areal_core.training.metrics_logger import MetricsLogger
    from areal_core.training.source import BatchSource, TrainingBatch
    from areal_core.training.weight_sync import WeightSync

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference between the engines' log-probabilities and the trainer's, by the dtype of the synced weights."""
STOPPING_PATIENCE_S = 15.0
"""How long a run that was asked to stop waits for an evaluation whose weights the trainer has no more."""


class Trainer:
    """Learns from batches and syncs weights. The same on every rank; only rank 0 has a source and a metrics logger.

    Args:
        config: of the run.
        learner: learns from a batch.
        weight_sync: brings weights to the inference engines; None where nothing generates.
        run_dir: where exports go.
        checkpoints: where this attempt's checkpoints go.
        source: of batches, on rank 0.
        read: makes the batch from what the source tells of it, on every rank.
        metrics_logger: of metrics, on rank 0.
        phase: says what this process is doing, on ranks that have no metrics logger.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        weight_sync: WeightSync | None,
        run_dir: Path,
        checkpoints: Path,
        source: BatchSource | None,
        read: Callable[[bytes], TrainingBatch],
        metrics_logger: MetricsLogger | None,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._config = config
        self._learner = learner
        self._weight_sync = weight_sync
        self._source, self._read = source, read
        self._metrics_logger = metrics_logger
        self._phase = phase if metrics_logger is None else metrics_logger.phase
        self._checkpointer = Checkpointer(
            config.checkpoint, run_dir, checkpoints, learner.changing, source, metrics_logger, self._phase, self._log
        )
        self._step = 0
        self._version = 0
        self._consumption_log = ConsumptionLog()
        self._exports = Exports(run_dir, learner.policy, metrics_logger)
        self._evaluated: int | None = None  # the step whose evaluation is under way
        self._failure: RunError | None = None

    def run(self, step: int, version: int, consumption_log: ConsumptionLog) -> bool:
        """Train from `step` to the end.

        Args:
            step: batches that the engines' parameters have been trained on.
            version: to sync first; 0 where the inference engines hold the same weights already.
            consumption_log: what earlier processes of this run had seen.

        Returns:
            True when all steps are done, False when the run was interrupted; either way a checkpoint is committed.

        Raises:
            RunError: a part of the run failed, or gradients stayed non-finite. Where only the rollouts did, a
                checkpoint was committed before.
        """
        self._step = self._checkpointer.latest = step
        self._consumption_log = consumption_log
        self._consumption_log.best = max(consumption_log.best, agree(self._exports.settle()))
        try:
            self._begin(version)
            if self._consumption_log.unevaluated is not None:
                self._begin_evaluation()
            while self._step < self._config.steps:
                with self._phase("wait"):
                    batch, groups, metrics = self._next_batch()
                if self._config.takes_turns and self._weight_sync is not None:
                    with self._phase("sleep"):
                        self._weight_sync.sleep()
                with self._phase("train"):
                    metrics |= self._learn(batch, groups)
                self._step += 1
                if not self._end_evaluation():
                    self._end_step(metrics)
                    raise Interrupted
                metrics |= self._sync()
                self._look_after(metrics)
        except Interrupted:
            try:
                self._checkpointer.save(self._step, self._consumption_log, is_last=True)
            except Exception as error:
                if self._failure is not None:  # which came first
                    raise self._failure from error
                raise
            if self._failure is not None:
                raise self._failure from None
            return False
        except (PeerClosed, DiskError):
            raise
        except Exception:
            with suppress(Exception):  # why training failed is what must be told
                self._checkpointer.finish()  # what was sound when it was taken is kept
            raise
        finally:
            self._exports.drop_candidate()
        self._checkpointer.save(self._step, self._consumption_log, is_last=True)
        if self._config.checkpoint.export:
            self._exports.write_model(self._step)
        return True

    def _begin(self, version: int) -> None:
        self._version = version
        if self._weight_sync is not None:
            with self._phase("weight_sync"):
                self._weight_sync.begin(version, self._step)
        evaluation = self._config.evaluation
        if self._step == 0 and evaluation is not None and evaluation.at_start:
            self._consumption_log.unevaluated = {}

    def _next_batch(self) -> TrainingBatch:
        told = None
        if self._source is not None:
            with self._stopping_in_order():
                told = self._source.next_batch(self._step)
        return self._read(share_or_stop(told))

    @contextmanager
    def _stopping_in_order(self) -> Iterator[None]:
        """What ends the rollouts, be it a signal or a failure of theirs, leaves the parameters sound: every rank stops
        as if it were interrupted, and a checkpoint can be kept. Only where the controller is gone can it not."""
        try:
            yield
        except Interrupted:
            pass
        except (PeerClosed, DiskError):
            raise
        except RunError as error:
            self._failure = error

    @contextmanager
    def _keeping_parameters(self) -> Iterator[None]:
        """A model that cannot be exported ends the run on all ranks, and costs nothing that was trained: a checkpoint
        is committed first, as of an interruption."""
        try:
            yield
        except DiskError:
            raise
        except RunError as error:
            self._failure = error
            raise Interrupted from error

    def _learn(self, batch: PackedBatch | None, groups: list[tuple[int, str]]) -> dict[str, float]:
        self._consumption_log.steps.append(groups)
        if batch is None:
            return {}
        metrics = self._learner.learn(batch, self._step, self._version, self._consumption_log.state)
        if self._metrics_logger is not None and self._learner.logged is not None:
            self._metrics_logger.batch_logged(self._step + 1, self._learner.logged)
        return metrics

    def _sync(self) -> dict[str, float]:
        if self._weight_sync is None:
            return {}
        with self._phase("weight_sync"):
            if not self._learner.has_learned and not self._config.takes_turns:
                self._weight_sync.keep(self._step)
                return {"version": float(self._version)}
            if self._config.takes_turns:
                torch.cuda.empty_cache()  # the engines take their memory back with this weight sync
            version = self._version = self._weight_sync.sync(self._step)
            self._learner.has_learned = False
            if self._metrics_logger is not None:
                self._metrics_logger.weights_synced(self._step, version)
        with self._phase("logprob_check"):
            checked = self._weight_sync.check_logprobs(TOLERANCES[self._config.model.dtype])
        return {**checked, "version": float(version)}

    def _look_after(self, metrics: dict[str, float]) -> None:
        """Write the step's metrics, evaluate, checkpoint: each where it is due. Generation goes on meanwhile."""
        self._checkpointer.look()
        if self._end_step(metrics):
            self._begin_evaluation()
        if self._checkpointer.is_due(self._step):
            self._checkpointer.save(self._step, self._consumption_log, is_last=self._step == self._config.steps)

    def _end_step(self, metrics: dict[str, float]) -> bool:
        """Write the step's metrics, or keep them for the checkpoints and for the evaluation that is due now; whether
        one is."""
        evaluation = self._config.evaluation
        if evaluation is not None and (self._step % evaluation.every == 0 or self._step == self._config.steps):
            self._consumption_log.unevaluated = metrics
            return True
        if self._metrics_logger is not None:
            self._metrics_logger.finish_step(self._step, metrics)
        return False

    def _begin_evaluation(self) -> None:
        """Begin the evaluation that the step owes, to be made while the next batch is waited for and trained on, or
        here and now. What is interrupted before that is in the checkpoint that follows: a resume begins with it."""
        self._evaluated = self._step
        if self._weight_sync is not None:
            with self._phase("weight_sync"):
                self._weight_sync.finish()
        if self._source is not None:
            self._source.begin_evaluation()
        evaluation = self._config.evaluation
        if evaluation is None or not self._config.evaluates_beside_training or self._step == self._config.steps:
            self._end_evaluation()
            return
        if self._metrics_logger is not None and self._consumption_log.unevaluated is not None:
            self._consumption_log.unevaluated = self._metrics_logger.end_step(self._consumption_log.unevaluated)
        if evaluation.keep_best and self._step:
            with self._keeping_parameters():
                self._exports.keep_candidate(self._step)

    def _end_evaluation(self) -> bool:
        """Wait for the evaluation that is under way, if one is, and write its step's metrics; whether it was made.

        Where it was not, for a stop of the run or a failure of the rollouts, it has left sound parameters. They are
        those of a later step if training has gone on: no resume can make that evaluation then, and it is given up.

        Raises:
            Interrupted: it was not made, and the step owes it still.
        """
        step, self._evaluated = self._evaluated, None
        if step is None:
            return True
        is_current = step == self._step
        if not is_current:
            self._checkpointer.look()  # the checkpoint of the evaluated step shall not wait for as long
        found: dict[str, float] = {}
        score = -math.inf if self._source is None else math.nan
        with self._phase("evaluate"):
            if self._source is not None:
                with self._stopping_in_order():
                    found = self._source.end_evaluation(0.0 if is_current else STOPPING_PATIENCE_S)
                    score = found.get("evaluation/reward", -math.inf)
        # Exporting is collective, so all ranks must know what rank 0 measured; no number at all is the end.
        score = agree(score)
        is_made = not math.isnan(score)
        if not is_made and is_current:
            raise Interrupted
        evaluation = self._config.evaluation
        if is_made and evaluation is not None and evaluation.keep_best and score > self._consumption_log.best:
            if step:
                with self._keeping_parameters():
                    self._exports.write_best(step, score)
            self._consumption_log.best = score
        self._exports.drop_candidate()
        metrics, self._consumption_log.unevaluated = self._consumption_log.unevaluated or {}, None
        if self._metrics_logger is not None:
            if not is_made:
                self._log(f"the evaluation of step {step} was given up: step {self._step} has been trained already")
            self._metrics_logger.write_step(
                step, {**(self._metrics_logger.end_step(metrics) if is_current else metrics), **found}
            )
        return is_made

    def _log(self, line: str) -> None:
        """A line for the user, on the rank that has a metrics logger."""
        if self._metrics_logger is not None:
            self._metrics_logger.log(line)
