"""What the trainer asks of an engine that learns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric
    from areal_core.interfaces.algorithm import LossResult
    from areal_core.interfaces.model import ModelReference


class Role(StrEnum):
    """What a training engine is for. A frozen role has no optimizer; a scalar role has a head of one output."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"

    @property
    def is_frozen(self) -> bool:
        """Whether its parameters never change."""
        return self in (Role.REFERENCE, Role.REWARD)

    @property
    def is_scalar(self) -> bool:
        """Whether it gives one value for each token instead of log-probabilities."""
        return self in (Role.CRITIC, Role.REWARD)


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an engine needs to know of the run to set up its optimizer.

    Attributes:
        total_updates: optimizer updates of the whole run, for schedules that decay.
        temperature: sampling temperature; logits are divided by it before log-probabilities and entropy.
    """

    total_updates: int
    temperature: float


class TrainEngine(Protocol):
    """A model in one of the four roles, on every rank of the trainer (SPMD).

    All ranks call the same methods with the same whole batch; the engine takes its rank's share, and results are
    those of the whole batch on every rank. Batches are already shifted (`areal_core.data.shift_to_predictions`).
    """

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load the model. `torch.distributed` is initialised before, with a gloo group for CPU tensors.

        Raises:
            RunError: the model cannot be loaded, or its log-probabilities cannot be computed by this engine.
        """

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of the whole batch without gradients.

        Args:
            batch: with `input_ids` and `targets`.
            outputs: of `logprobs`, `entropy` (roles with a vocabulary) and `values` (scalar roles).

        Returns:
            By name, float32 [sum(T)] on the CPU: at position t what is predicted of `targets[t]`.
        """

    def train(
        self,
        batch: PackedBatch,
        loss: Callable[[PackedBatch, Mapping[str, torch.Tensor]], LossResult],
        outputs: Sequence[str],
    ) -> dict[str, Metric]:
        """One optimizer update. Where the gradient is 0, as when no token has a weight, momentum moves nothing either.

        The batch is split over ranks and micro-batches, units whole; `loss` is called for each micro-batch with the
        outputs on its tokens (with gradients, on the engine's device) and returns a *sum*, so that any split adds up
        to the same gradient; metrics are put together over micro-batches and ranks by their kind.

        Returns:
            The metrics of the whole batch on every rank, with the means `loss`, `gradient_norm` (before clipping) and
            `learning_rate`, and the sum `skipped`, 1 where a non-finite gradient left the parameters as they were.

        Raises:
            RunError: the role is frozen.
        """

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
