"""What the suites of training engines share: an engine in a role, a batch, and losses."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import Metric
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, CRITIC, REFERENCE, LossResult, LossSpec, Role
from areal_testing.conformance.batches import VALUES_SAY, make_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.engines import TrainEngine
    from areal_core.sdk import Loss

OUTPUTS = ("logprobs", "entropy")
REWARD_MODEL = Role("reward", head="scalar")
STILL: dict[str, Any] = {"learning_rate": 1e-12}
"""So small that no float32 parameter moves: updates of which only the gradient is looked at."""


class TrainingSession:
    """The base of the suites of training engines; the author overrides `make_engine`.

    Attributes:
        tolerance: of log-probabilities, entropies and values, in float32.
        gradient_tolerance: relative, of the gradient's norm.
        architectures: of the tiny models that the engine can load: qwen3 (tied embeddings) and llama (untied).
        roles: those that the engine can play.
    """

    tolerance = 1e-4
    gradient_tolerance = 1e-4
    architectures: Sequence[str] = ("qwen3", "llama")
    roles: Sequence[Role] = (ACTOR, CRITIC, REFERENCE, REWARD_MODEL)

    def make_engine(
        self, *, learning_rate: float, max_tokens_per_microbatch: int, max_gradient_norm: float | None
    ) -> TrainEngine:
        """A new engine before `setup`, with a constant learning rate and without weight decay."""
        raise NotImplementedError(f"{type(self).__name__} must say how its engine is made: override make_engine")

    @contextmanager
    def engine(
        self,
        model: Path,
        *,
        role: Role = ACTOR,
        temperature: float = 1.0,
        learning_rate: float = 1e-3,
        max_tokens_per_microbatch: int = 4096,
        max_gradient_norm: float | None = None,
    ) -> Iterator[TrainEngine]:
        """An engine that is ready, closed at the end."""
        engine = self.make_engine(
            learning_rate=learning_rate,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            max_gradient_norm=max_gradient_norm,
        )
        try:
            engine.setup(
                ModelReference(str(model)), role, OptimizerSettings(total_updates=100, temperature=temperature)
            )
            yield engine
        finally:
            engine.close()


def make_training_batch() -> PackedBatch:
    """Twelve ragged sequences with advantages, and weights of a mean over all tokens of the loss."""
    batch = make_batch(seed=2)
    mask = batch["loss_mask"].float()
    return batch.with_tokens(advantages=batch[VALUES_SAY], loss_weights=mask / mask.sum())


def train(engine: TrainEngine, batch: PackedBatch, loss: Loss, outputs: Sequence[str]) -> dict[str, float]:
    """One update, and its metrics as numbers."""
    return numbers_of(engine.train([LossSpec("any", batch, outputs, loss)]))


def numbers_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as they stand in `metrics.jsonl`."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        assert isinstance(metric, Metric), f"metric '{name}' is {type(metric).__name__}, not a Metric"
        found |= metric.as_numbers(name)
    return found


def policy_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """A policy gradient with an entropy bonus; counts what it sees, and logs a metric of every kind."""
    each = -batch["advantages"] * outputs["logprobs"] - 0.1 * outputs["entropy"]
    metrics = {
        "tokens": Metric.sum(batch["loss_mask"]),
        "sequences": Metric.sum(float(len(batch))),
        "logprob": Metric.mean(outputs["logprobs"], batch["loss_mask"]),
        "largest_advantage": Metric.maximum(batch["advantages"]),
        "advantage": Metric.histogram(batch["advantages"], (-1.0, 0.0, 1.0)),
    }
    if bool((batch["place"] == 0).any()):  # only the micro-batch that holds the first token has this one
        metrics["first"] = Metric.mean(batch["advantages"], batch["place"] == 0)
    return LossResult((batch["loss_weights"] * each).sum(), metrics)


def likelihood_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """The mean negative log-likelihood."""
    return LossResult(-(batch["loss_weights"] * outputs["logprobs"]).sum())


def value_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """The squared distance from made-up returns."""
    each = (outputs["values"] - batch["advantages"]).square()
    return LossResult((batch["loss_weights"] * each).sum())


def parameters_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Copies of all parameters; a name that is given twice is an error."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in engine.named_full_parameters():
        assert name not in found, f"parameter {name} is given twice"
        found[name] = tensor.detach().to("cpu", copy=True)
    return found


def check_description(engine: TrainEngine) -> None:
    """`named_meta_parameters` describes what `named_full_parameters` yields."""
    described = [(name, tensor.dtype, *tensor.shape) for name, tensor in engine.named_meta_parameters()]
    yielded = [(name, tensor.dtype, *tensor.shape) for name, tensor in engine.named_full_parameters()]
    differing = [pair for pair in zip_longest(described, yielded) if pair[0] != pair[1]]
    assert differing == [], (
        f"named_meta_parameters has {differing[0][0]} where named_full_parameters has {differing[0][1]}"
    )


def same_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], message: str) -> None:
    """Equal names and equal bits."""
    odd = sorted(found.keys() ^ wanted.keys())
    assert odd == [], f"{message}: names differ: {odd[:4]}"
    differing = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert differing == [], f"{message}: {len(differing)} of {len(wanted)} tensors differ, such as {differing[:2]}"
