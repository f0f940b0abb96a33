"""What the trainer asks of an engine that learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric
    from areal_core.interfaces.algorithm import LossSpec
    from areal_core.interfaces.model import ModelReference, Role


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an engine needs to know of the run to set up its optimizer.

    Attributes:
        total_updates: optimizer updates of the whole run, for schedules that decay.
        temperature: of sampling, 1 where nothing samples; logits are divided by it, in all outputs.
        learning_rate: the algorithm's, where the engine's own settings have none.
        is_exported: whether the run writes the model for users; the engine then tries in `setup` what an export needs.
    """

    total_updates: int
    temperature: float
    learning_rate: float = 1e-6
    is_exported: bool = False


class TrainEngine(Protocol):
    """A model in a role, on every rank of the trainer (SPMD).

    All ranks call the same methods with the same whole batch; the engine takes its rank's share, and results are
    those of the whole batch on every rank. Batches are already shifted (`areal_core.data.shift_to_predictions`).
    """

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load the model. `torch.distributed` is initialized before, with a gloo group for CPU tensors.

        Raises:
            RunError: the model cannot be loaded, or its log-probabilities cannot be computed by this engine.
        """

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of the whole batch without gradients.

        Args:
            batch: with `input_ids` and `targets`.
            outputs: of `logprobs`, `entropy` (a head of the vocabulary) and `values` (a scalar head), and of what
                `ComparingEngine` adds.

        Returns:
            By name, float32 [sum(T)] on the CPU: at position t what is predicted of `targets[t]`.
        """

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """One optimizer update on the sum of all losses. Where the gradient is 0, as when no token has a weight,
        momentum moves nothing either.

        Each batch is split over ranks and micro-batches, units whole; its `loss` is called for each micro-batch with
        the outputs on its tokens (with gradients, on the engine's device) and returns a *sum*, so that any split adds
        up to the same gradient; metrics are put together over works, micro-batches and ranks by their kind.

        An engine may offer outputs that are wider than one number a token; they are there for a loss alone, and never
        leave the device: `hidden`, the last hidden states [T, hidden size]; `topk:K`, the log-probabilities of the K
        likeliest tokens, [T, K] float32, the likeliest first, and beside it `topk:K:ids`, [T, K] int64.

        Args:
            works: all of this role.

        Returns:
            The metrics of the whole update on every rank, with the means `loss`, `gradient_norm` (before clipping) and
            `learning_rate`, and the sum `skipped`, 1 where a non-finite gradient left the parameters as they were.

        Raises:
            RunError: the role is frozen.
        """

    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """own = decay x own + (1 - decay) x source, of an engine of the same kind and layout; see `EMA`. Collective."""

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole tensor of each parameter, as in the model's safetensors, tied ones once.

        A collective operation: every rank must exhaust it; the tensors are valid until the next one is asked for.
        """

    def save(self, folder: Path) -> None:
        """Write parameters, optimizer, schedule and random state below `folder`; collective."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit, on any number of ranks; collective."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with safetensors, config and tokenizer; collective.

        The caller gives it its name once it is whole, and removes what is left where this fails.
        """

    def close(self) -> None:
        """Free everything; safe to call twice."""


@runtime_checkable
class MeasuringEngine(Protocol):
    """A `TrainEngine` that knows what its work took. These figures depend on ranks and micro-batches, as the metrics
    of `train` never do: they have a place of their own, `engine/NAME` of a run's metrics."""

    def measurements(self) -> dict[str, float]:
        """What was done since the last call, by name, of all ranks together; it waits for no device and no rank."""


@runtime_checkable
class DescribingEngine(Protocol):
    """A `TrainEngine` that knows its parameters without gathering them: of a large model that takes long."""

    def named_meta_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each parameter as `named_full_parameters` gives them, in its order, on the device `meta`:
        of the whole shape, without values. Not collective."""


@runtime_checkable
class ComparingEngine(Protocol):
    """A `TrainEngine` that also computes `divergence:ROLE:BETA`, with gradients where it learns.

    With P the distribution of ROLE behind a token, Q that of the engine's own role and M = β P + (1 - β) Q it is
    β KL(P ‖ M) + (1 - β) KL(Q ‖ M) in nats, [T] float32, the generalized Jensen-Shannon divergence (GKD, arXiv
    2306.13649, equation 1); at the ends, where that is 0, KL(P ‖ Q) for BETA 0 and KL(Q ‖ P) for BETA 1. Neither
    distribution leaves the device, and the other role learns nothing.
    """

    def compare_with(self, engines: Mapping[str, TrainEngine]) -> None:
        """Called once, when every role has its engine: these, by role, its own among them."""


@runtime_checkable
class AdapterEngine(Protocol):
    """A `TrainEngine` that may leave its model as it was and train an adapter beside it (LoRA, arXiv 2106.09685).

    Attributes:
        begins_elsewhere: whether it begins from an adapter, and not as its model's folder says: then its weights are
            synced before the first prompt.
    """

    begins_elsewhere: bool

    def reference_from_base(self, model: ModelReference, role: Role) -> TrainEngine | None:
        """The model with its adapter switched off, for a role that never changes, closed with this engine at the
        latest; None where that is not `model`. It computes between this engine's calls and copies no parameter."""


@runtime_checkable
class SnapshotEngine(Protocol):
    """A `TrainEngine` whose checkpoints can be written while it goes on training.

    Of other engines checkpoints are written by `save`, while training waits.
    """

    def snapshot_size(self) -> int:
        """Bytes of host memory that this rank's next snapshot takes, beyond what former ones hold already."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy to host memory what `save` would write now; collective.

        Returns:
            Writes the copy below a folder, for `load`, whatever was trained meanwhile. It is called in another thread
            on all ranks, while this one trains: collective, but never on a group that training uses. It is not called
            any more once the next snapshot is asked for, which may take the memory of this one.
        """
