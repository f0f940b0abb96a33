"""The training loop. `Trainer.run` is the page to read: wait, learn, publish, look after, once for every step."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from areal_core.data import shift_to_predictions
from areal_core.errors import RunError
from areal_core.interfaces.source import Interrupted
from areal_core.training.checkpoint import Witness, prune_checkpoints, write_checkpoint
from areal_core.training.distribution import distribute

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.algorithm import Algorithm, Forward
    from areal_core.interfaces.source import BatchSource
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.journal import Journal
    from areal_core.training.publication import Publisher


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop needs of the run's config; each is documented there."""

    steps: int
    seed: int
    updates_per_batch: int = 1
    epochs_per_batch: int = 1
    max_skipped_updates: int = 3
    evaluate_every: int = 0
    evaluate_at_start: bool = True
    keep_best: bool = True
    checkpoint_every: int = 0
    checkpoints_kept: int = 2
    export: bool = True
    shares_memory: bool = False
    verify_every: int = 0
    tolerance: float = 1e-3


class Observer(Protocol):
    """Told of what happened, on rank 0; a run passes the plugins' event hooks."""

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        ...

    def weights_published(self, step: int, version: int) -> None:
        """The engines are given the weights of `version`."""
        ...

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """A checkpoint is committed at `path`."""
        ...


class Trainer:
    """Learns from batches and publishes weights. The same on every rank; only rank 0 has a source and a journal.

    Args:
        settings: of the loop.
        algorithm: what to do with a batch.
        engines: by role; `actor` learns, `reference` is there where the algorithm needs it.
        publisher: brings the actor's weights to the inference engines.
        run_dir: where checkpoints and exports go.
        source: of batches, on rank 0.
        journal: of metrics, on rank 0.
        observer: told on rank 0.
    """

    def __init__(
        self,
        settings: LoopSettings,
        algorithm: Algorithm,
        engines: Mapping[str, TrainEngine],
        publisher: Publisher | None,
        run_dir: Path,
        source: BatchSource | None,
        journal: Journal | None,
        observer: Observer | None = None,
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm
        self._actor = engines["actor"]
        self._forward: dict[str, Forward] = {role: engine.forward for role, engine in engines.items()}
        self._publisher = publisher
        self._run_dir = run_dir
        self._source = source
        self._journal = journal
        self._observer = observer
        self._step = 0
        self._version = 0
        self._committed = 0
        self._published = 0
        self._skipped = 0
        self._best = -math.inf
        self._witness = Witness()

    def run(self, step: int = 0, witness: Witness | None = None) -> bool:
        """Train from `step` to the end.

        Args:
            step: batches that the engine's parameters have been trained on.
            witness: what an earlier process of this run had seen.

        Returns:
            True when all steps are done, False when the run was interrupted; either way a checkpoint is committed.

        Raises:
            RunError: a part of the run failed, or gradients stayed non-finite.
        """
        self._step = self._committed = step
        self._witness = witness or Witness()
        self._begin()
        try:
            while self._step < self._settings.steps:
                with self._phase("wait"):
                    batch, metrics = self._next_batch()
                if self._settings.shares_memory:
                    with self._phase("release"):
                        self._release_engines()
                with self._phase("train"):
                    metrics |= self._learn(batch)
                self._step += 1
                with self._phase("publish"):
                    self._publish()
                metrics |= self._verify()
                metrics |= self._look_after()
                self._finish_step(metrics)
        except Interrupted:
            self._checkpoint()
            return False
        self._checkpoint()
        if self._settings.export:
            self._actor.export(self._run_dir / "model")
        return True

    def _begin(self) -> None:
        first = self._source.first_version(self._step) if self._source is not None else 0
        self._version = int(self._agree(first))
        folder = self._publisher.write(self._version) if self._publisher is not None and self._version else None
        if self._source is not None:
            self._source.begin(self._version, self._step, folder)
        if self._step == 0 and self._settings.evaluate_every and self._settings.evaluate_at_start:
            metrics = self._evaluate()
            if self._journal is not None:
                self._journal.step_done(0, metrics)

    def _next_batch(self) -> tuple[PackedBatch | None, dict[str, float]]:
        if self._source is None:
            return distribute(None), {}
        try:
            result = self._source.next_batch(self._step)
        except Interrupted:
            distribute(None)
            raise
        return distribute(result), result[1]

    def _learn(self, batch: PackedBatch | None) -> dict[str, float]:
        self._witness.saw(batch)
        if batch is None:
            return {}
        settings = self._settings
        batch = shift_to_predictions(batch)
        updates = settings.updates_per_batch * settings.epochs_per_batch
        batch = self._algorithm.prepare(batch, self._forward, updates)
        results = [self._update(minibatch) for minibatch in self._minibatches(batch)]
        names = {name for result in results for name in result}
        return {
            f"train/{name}": math.fsum(result.get(name, 0.0) for result in results) / len(results) for name in names
        }

    def _update(self, minibatch: PackedBatch) -> dict[str, float]:
        result = self._actor.train(self._algorithm.weigh(minibatch), self._algorithm.loss, self._algorithm.outputs)
        self._skipped = self._skipped + 1 if result["skipped"] else 0
        if self._skipped >= self._settings.max_skipped_updates:
            raise RunError(
                f"the gradient was not finite in {self._skipped} updates in a row (step {self._step})",
                hints=[
                    "lower train_engine.learning_rate or look at the rewards; training.max_skipped_updates is the limit"
                ],
            )
        return result

    def _minibatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """Cut a batch into updates by whole groups, shuffled anew in each epoch over the batch."""
        settings = self._settings
        groups = sorted(set(batch["group_id"].tolist()))
        for epoch in range(settings.epochs_per_batch):
            if settings.updates_per_batch == 1:
                yield batch
                continue
            random.Random(f"{settings.seed}/{self._step}/{epoch}").shuffle(groups)
            size = math.ceil(len(groups) / settings.updates_per_batch)
            for start in range(0, len(groups), size):
                members = set(groups[start : start + size])
                yield batch.select([row for row, group in enumerate(batch["group_id"].tolist()) if group in members])

    def _release_engines(self) -> None:
        """The inference engines leave their memory to the trainer; no rank goes on before they have."""
        if self._source is not None:
            self._source.release_engines()
        dist.barrier()

    def _publish(self) -> None:
        if self._publisher is None:
            return
        self._version += 1
        if self._settings.shares_memory:
            torch.cuda.empty_cache()  # the engines take their memory back with this publication
        self._publisher.publish(self._version, self._step)
        if self._observer is not None:
            self._observer.weights_published(self._step, self._version)

    def _verify(self) -> dict[str, float]:
        """Compare the engines' log-probabilities with the trainer's: after the first publication, then now and then."""
        self._published += 1
        every = self._settings.verify_every
        if self._publisher is None or (self._published > 1 and (not every or self._published % every)):
            return {}
        with self._phase("verify"):
            probe = self._source.probe() if self._source is not None else None
            batch = distribute((probe, {}))
            if batch is None:
                return {}
            batch = shift_to_predictions(batch)
            told, computed = batch["logprobs"], self._actor.forward(batch, ["logprobs"])["logprobs"]
        gaps = (told - computed).abs()[batch["loss_mask"]]
        mean = float(gaps.mean())
        if not mean <= self._settings.tolerance:
            raise RunError(
                f"the inference engine does not hold the weights that were published: its log-probabilities differ by "
                f"{mean:.4f} on average from the trainer's (publication.tolerance is {self._settings.tolerance:g})",
                hints=["look at its log for parameters that it did not take over; a wrong dtype shows like this too"],
            )
        return {
            "verify/logprob_difference_mean": mean,
            "verify/logprob_difference_p99": float(gaps.quantile(0.99)),
            "verify/logprob_difference_max": float(gaps.max()),
        }

    def _look_after(self) -> dict[str, float]:
        """Evaluate and checkpoint where it is due. Generation goes on meanwhile."""
        settings, metrics = self._settings, {}
        is_last = self._step == settings.steps
        if settings.evaluate_every and (self._step % settings.evaluate_every == 0 or is_last):
            metrics = self._evaluate()
        if settings.checkpoint_every and self._step % settings.checkpoint_every == 0:
            self._checkpoint()
        return metrics

    def _evaluate(self) -> dict[str, float]:
        with self._phase("evaluate"):
            metrics = self._source.evaluate() if self._source is not None else {}
        # Exporting is collective, so all ranks must know what rank 0 measured.
        score = self._agree(metrics.get("evaluation/reward", -math.inf))
        if self._settings.keep_best and score > self._best:
            self._best = score
            if self._step:
                self._actor.export(self._run_dir / "best")
        return metrics

    def _checkpoint(self) -> None:
        if self._step == self._committed and self._step:
            return
        with self._phase("checkpoint"):
            name = write_checkpoint(self._run_dir, self._step, self._actor, self._witness)
            self._committed = self._step
            if self._source is not None:
                self._source.commit(self._step, name)
                prune_checkpoints(self._run_dir, self._settings.checkpoints_kept, name)
                if self._observer is not None:
                    self._observer.checkpoint_saved(self._step, self._run_dir / "checkpoints" / name)

    def _finish_step(self, metrics: dict[str, float]) -> None:
        if self._journal is not None:
            metrics = self._journal.step_done(self._step, {**metrics, "version": float(self._version)})
            if self._observer is not None:
                self._observer.step_finished(self._step, metrics)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._journal.phase(name) if self._journal is not None else nullcontext()

    @staticmethod
    def _agree(value: float) -> float:
        """Rank 0's value on every rank."""
        shared = torch.tensor([value], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(shared, 0)
        return float(shared)
