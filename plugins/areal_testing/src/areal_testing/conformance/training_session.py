"""The base of the suites of training engines: an engine in a role, a batch, and losses."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import Metric
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, CRITIC, REFERENCE, LossResult, LossSpec, Role
from areal_testing.conformance.batches import VALUES_OUTPUT, make_batch
from areal_testing.conformance.models import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.engines import TrainEngine
    from areal_core.sdk import Loss

OUTPUTS = ("logprobs", "entropy")
REWARD_MODEL = Role("reward", head="scalar")
STILL: dict[str, Any] = {"learning_rate": 1e-12}
"""Options of updates whose gradient is tested: the learning rate is so small that no float32 parameter changes."""


class TrainingSession:
    """The base of the suites of training engines. Override `make_engine`.

    Attributes:
        tolerance: largest absolute difference of log-probabilities, entropies and values, in float32.
        gradient_tolerance: largest relative difference of the gradient norm.
        architectures: tiny models that the engine can load, of those in `models.ARCHITECTURES`. Most tests use the
            first; "qwen3" has tied embeddings, "llama" untied ones.
        roles: roles that the engine supports.
        more_outputs: optional outputs that the engine computes and its settings declare, of `top_logprobs` and
            `sum_pi_squared`. The tests of others are skipped.
    """

    tolerance = 1e-4
    gradient_tolerance = 1e-4
    architectures: Sequence[str] = ("qwen3", "llama")
    roles: Sequence[Role] = (ACTOR, CRITIC, REFERENCE, REWARD_MODEL)
    more_outputs: Sequence[str] = ()

    def make_engine(
        self, *, learning_rate: float, max_tokens_per_microbatch: int, max_gradient_norm: float | None
    ) -> TrainEngine:
        """Return a new engine before `setup`, with a constant learning rate and without weight decay."""
        raise NotImplementedError(f"{type(self).__name__} must override make_engine and return its engine")

    def make_model(self, folder: Path, architecture: str | None = None, *, seed: int = 0) -> Path:
        """Write a tiny model, of the first of `architectures` unless one is given. See `models.make_model`."""
        return make_model(folder, architecture=architecture or self.architectures[0], seed=seed)

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
        """Set up an engine, and close it at the end of the block."""
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
    """Return 12 ragged sequences with advantages, and weights of a mean over all tokens in the loss mask."""
    batch = make_batch(seed=2)
    mask = batch["loss_mask"].float()
    return batch.with_tokens(advantages=batch[VALUES_OUTPUT], loss_weights=mask / mask.sum())


def train(engine: TrainEngine, batch: PackedBatch, loss: Loss, outputs: Sequence[str]) -> dict[str, float]:
    """Make one update, and return its metrics as numbers."""
    return numbers_of(engine.train([LossSpec("any", batch, outputs, loss)]))


def numbers_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return metrics as numbers by name, as in `metrics.jsonl`."""
    numbers: dict[str, float] = {}
    for name, metric in metrics.items():
        assert isinstance(metric, Metric), f"metric '{name}' is {type(metric).__name__}, not a Metric"
        numbers |= metric.as_numbers(name)
    return numbers


def policy_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """Return a policy gradient loss with an entropy bonus, and a metric of every kind."""
    losses = -batch["advantages"] * outputs["logprobs"] - 0.1 * outputs["entropy"]
    metrics = {
        "tokens": Metric.sum(batch["loss_mask"]),
        "sequences": Metric.sum(float(len(batch))),
        "logprob": Metric.mean(outputs["logprobs"], batch["loss_mask"]),
        "largest_advantage": Metric.maximum(batch["advantages"]),
        "advantage": Metric.histogram(batch["advantages"], (-1.0, 0.0, 1.0)),
    }
    if bool((batch["place"] == 0).any()):  # only one micro-batch holds the first token
        metrics["first"] = Metric.mean(batch["advantages"], batch["place"] == 0)
    return LossResult((batch["loss_weights"] * losses).sum(), metrics)


def likelihood_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """Return the negative log-likelihood, weighted by `loss_weights`."""
    return LossResult(-(batch["loss_weights"] * outputs["logprobs"]).sum())


def value_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """Return the squared distance of the values from `advantages`, which serve as returns."""
    losses = (outputs["values"] - batch["advantages"]).square()
    return LossResult((batch["loss_weights"] * losses).sum())


def parameters_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return copies of all parameters by name. Assert that names are unique."""
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in engine.named_full_parameters():
        assert name not in parameters, f"named_full_parameters yields {name} twice"
        parameters[name] = tensor.detach().to("cpu", copy=True)
    return parameters


def check_description(engine: TrainEngine) -> None:
    """Assert that `named_meta_parameters` describes the tensors of `named_full_parameters`."""
    described = [(name, tensor.dtype, *tensor.shape) for name, tensor in engine.named_meta_parameters()]
    yielded = [(name, tensor.dtype, *tensor.shape) for name, tensor in engine.named_full_parameters()]
    differing = [pair for pair in zip_longest(described, yielded) if pair[0] != pair[1]]
    assert differing == [], (
        f"named_meta_parameters has {differing[0][0]} where named_full_parameters has {differing[0][1]}"
    )


def same_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], message: str) -> None:
    """Assert that tensors have the same names and the same bits."""
    odd = sorted(actual.keys() ^ expected.keys())
    assert odd == [], f"{message}: names differ: {odd[:4]}"
    differing = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert differing == [], f"{message}: {len(differing)} of {len(expected)} tensors differ, such as {differing[:2]}"
