"""The training loop. `Trainer.run` is the page to read: wait, learn, publish, look after, once for every step."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from areal_core.disk import DiskError, replacing_folder, settle_folder, tree_size, wait_for_room
from areal_core.errors import RunError
from areal_core.messages import ChannelClosed
from areal_core.training.checkpoint import Witness
from areal_core.training.distribution import agree, distribute
from areal_core.training.saver import Saver
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.data import PackedBatch
    from areal_core.training.journal import Journal
    from areal_core.training.learner import Learner
    from areal_core.training.publication import Publication
    from areal_core.training.source import BatchSource

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference between the engines' log-probabilities and the trainer's, by the dtype of the published weights."""
SCORE_FILE = "evaluation.json"
"""Beside the best model: the step and the score that made it the best."""


class Trainer:
    """Learns from batches and publishes weights. The same on every rank; only rank 0 has a source and a journal.

    Args:
        config: of the run.
        learner: learns from a batch.
        publication: brings weights to the inference engines; None where nothing generates.
        run_dir: where exports go.
        checkpoints: where this epoch's checkpoints go.
        source: of batches, on rank 0.
        journal: of metrics, on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publication: Publication | None,
        run_dir: Path,
        checkpoints: Path,
        source: BatchSource | None,
        journal: Journal | None,
    ) -> None:
        self._config = config
        self._learner = learner
        self._publication = publication
        self._run_dir = run_dir
        self._source = source
        self._journal = journal
        self._saver = Saver(
            config.checkpoint, run_dir, checkpoints, learner.changing, source, journal, self._phase, self._tell
        )
        self._step = 0
        self._version = 0
        self._witness = Witness()
        self._model_size = 0  # bytes of the last one that was exported
        self._failure: RunError | None = None

    def run(self, step: int, version: int, witness: Witness) -> bool:
        """Train from `step` to the end.

        Args:
            step: batches that the engines' parameters have been trained on.
            version: to publish first; 0 where the inference engines hold the same weights already.
            witness: what earlier processes of this run had seen.

        Returns:
            True when all steps are done, False when the run was interrupted; either way a checkpoint is committed.

        Raises:
            RunError: a part of the run failed, or gradients stayed non-finite. Where only the rollouts did, a
                checkpoint was committed before.
        """
        self._step = self._saver.latest = step
        self._witness = witness
        self._witness.best = max(witness.best, agree(self._best_score()))
        try:
            self._begin(version)
            if self._witness.unevaluated is not None:
                self._finish_step(self._witness.unevaluated)
            while self._step < self._config.steps:
                with self._phase("wait"):
                    batch, metrics = self._next_batch()
                if self._config.placement.in_turns and self._publication is not None:
                    with self._phase("release"):
                        self._publication.release_memory()
                with self._phase("train"):
                    metrics |= self._learn(batch)
                self._step += 1
                metrics |= self._publish()
                self._look_after(metrics)
        except Interrupted:
            try:
                self._saver.save(self._step, self._witness, is_last=True)
            except Exception as error:
                if self._failure is not None:  # which came first
                    raise self._failure from error
                raise
            if self._failure is not None:
                raise self._failure from None
            return False
        except (ChannelClosed, DiskError):
            raise
        except Exception:
            with suppress(Exception):  # why training failed is what must be told
                self._saver.finish()  # what was sound when it was taken is kept
            raise
        self._saver.save(self._step, self._witness, is_last=True)
        if self._config.checkpoint.export:
            self._export("model")
        return True

    def _begin(self, version: int) -> None:
        self._version = version
        if self._publication is not None:
            with self._phase("publish"):
                self._publication.begin(version, self._step)
        evaluation = self._config.evaluation
        if self._step == 0 and evaluation is not None and evaluation.at_start:
            metrics = self._evaluate()
            if self._journal is not None:
                self._journal.finish_step(0, metrics)

    def _next_batch(self) -> tuple[PackedBatch | None, dict[str, float]]:
        if self._source is None:
            return distribute(None), {}
        result = None
        with self._stopping_in_order():
            result = self._source.next_batch(self._step)
        return distribute(result), result[1] if result is not None else {}

    @contextmanager
    def _stopping_in_order(self) -> Iterator[None]:
        """What ends the rollouts, be it a signal or a failure of theirs, leaves the parameters sound: every rank stops
        as if it were interrupted, and a checkpoint can be kept. Only where the controller is gone can it not."""
        try:
            yield
        except Interrupted:
            pass
        except (ChannelClosed, DiskError):
            raise
        except RunError as error:
            self._failure = error

    def _learn(self, batch: PackedBatch | None) -> dict[str, float]:
        self._witness.see(batch)
        if batch is None:
            return {}
        return self._learner.learn(batch, self._step, self._version, self._witness.state)

    def _publish(self) -> dict[str, float]:
        if self._publication is None:
            return {}
        with self._phase("publish"):
            if not self._learner.has_learned and not self._config.placement.in_turns:
                self._publication.keep(self._step)
                return {"version": float(self._version)}
            if self._config.placement.in_turns:
                torch.cuda.empty_cache()  # the engines take their memory back with this publication
            version = self._version = self._publication.publish(self._step)
            self._learner.has_learned = False
            if self._journal is not None:
                self._journal.weights_published(self._step, version)
        with self._phase("verify"):
            verified = self._publication.verify(TOLERANCES[self._config.model.dtype])
        return {**verified, "version": float(version)}

    def _look_after(self, metrics: dict[str, float]) -> None:
        """Evaluate, write the step's metrics, checkpoint: each where it is due. Generation goes on meanwhile."""
        self._saver.look()
        evaluation = self._config.evaluation
        is_last = self._step == self._config.steps
        if evaluation is not None and (self._step % evaluation.every == 0 or is_last):
            self._witness.unevaluated = metrics
        self._finish_step(metrics)
        if self._saver.is_due(self._step):
            self._saver.save(self._step, self._witness, is_last=is_last)

    def _finish_step(self, metrics: dict[str, float]) -> None:
        """Make the evaluation that the step still owes, and write its metrics. What is interrupted here is in the
        checkpoint that follows, so that a resume begins with it."""
        if self._witness.unevaluated is not None:
            metrics = {**metrics, **self._evaluate()}
            self._witness.unevaluated = None
        if self._journal is not None:
            self._journal.finish_step(self._step, metrics)

    def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with self._phase("evaluate"):
            if self._publication is not None:
                self._publication.finish()
            score = -math.inf if self._source is None else math.nan
            if self._source is not None:
                with self._stopping_in_order():
                    metrics = self._source.evaluate()
                    score = metrics.get("evaluation/reward", -math.inf)
        # Exporting is collective, so all ranks must know what rank 0 measured; no number at all is the end.
        score = agree(score)
        if math.isnan(score):
            raise Interrupted
        evaluation = self._config.evaluation
        if evaluation is not None and evaluation.keep_best and score > self._witness.best:
            self._witness.best = score
            if self._step:
                self._export("best", {"step": self._step, "evaluation/reward": score})
        return metrics

    def _export(self, name: str, score: Mapping[str, float] | None = None) -> None:
        """Write a Hugging Face folder below the run's, and its score with it, which a resume must not forget."""
        is_first = self._journal is not None
        if is_first:  # before all ranks write together, for they cannot try again one by one
            wait_for_room("a model", self._run_dir, self._model_size, self._tell)
        with replacing_folder(f"the model of step {self._step}", self._run_dir / name, swaps=is_first) as folder:
            self._learner.policy.export(folder)
            if is_first:
                self._model_size = tree_size(folder)
                if score is not None:
                    (folder / SCORE_FILE).write_text(json.dumps(score))

    def _best_score(self) -> float:
        """Of the best model that earlier processes of the run have written, once what a kill has left is put right."""
        if self._journal is not None:
            for name in ("best", "model"):
                settle_folder(self._run_dir / name)
            path = self._run_dir / "best" / SCORE_FILE
            try:
                return float(json.loads(path.read_text())["evaluation/reward"]) if path.is_file() else -math.inf
            except (OSError, ValueError, LookupError, TypeError) as error:
                self._tell(f"the score in {path} cannot be read and counts as none: {error!r}")
        return -math.inf

    def _tell(self, line: str) -> None:
        """A line for the user, on the rank that has a journal."""
        if self._journal is not None:
            self._journal.tell(line)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._journal.phase(name) if self._journal is not None else nullcontext()
