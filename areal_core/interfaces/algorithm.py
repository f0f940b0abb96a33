"""An algorithm is `advantage ∘ filter ∘ correction ∘ loss ∘ aggregation`, each of them a component.

All of them are pure functions of packed tensors. Flat tensors have the shape [T], where T is the sum of the sequence
lengths of a (micro-)batch whose per-token keys are shifted: position t is about `targets[t]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric

    Forward = Callable[[PackedBatch, Sequence[str]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What corrections and policy losses are computed from; flat [T] tensors of whole sequences.

    Attributes:
        logprobs: float32, current policy, with gradients.
        proximal_logprobs: float32, the policy at the start of the batch, detached: the centre of clipping.
        behaviour_logprobs: float32, the policy that sampled the token, as the inference engine reported it.
        advantages: float32.
        mask: bool, the token was sampled by the policy and is learnt from.
        row_index: int64, the sequence of each token.
        rows: how many sequences.
        entropy: float32 with gradients, where the algorithm asked for it.
        reference_logprobs: float32, where there is a reference model.
    """

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    row_index: torch.Tensor
    rows: int
    entropy: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of a flat tensor over the masked tokens of each sequence, [rows]; 0 where a sequence has none."""
        count = values.new_zeros(self.rows).index_add(0, self.row_index, self.mask.to(values.dtype))
        return self.row_sum(values) / count.clamp(min=1)

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a flat tensor over the masked tokens of each sequence, [rows]."""
        # Where the mask is off a value may be infinite: select, do not multiply.
        return values.new_zeros(self.rows).index_add(0, self.row_index, values.where(self.mask, 0.0))


@dataclass(slots=True)
class LossResult:
    """A loss to minimise, summed over a micro-batch, with what to log.

    Attributes:
        loss: [] with gradients; the sum over micro-batches and ranks is the loss of the update.
        metrics: of the micro-batch, by name; each says by its kind how micro-batches and ranks are put together.
    """

    loss: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


class Advantage(Protocol):
    """Turns rewards into advantages. A function `(batch, **settings)`."""

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Args: batch, the whole batch, with `reward` [B], `group_id`, `episode_id`, `loss_mask`, and `values` [T]
        where the algorithm has a critic.

        Returns:
            [B] float32, one advantage for each sequence, or [T] float32, one for each token.
        """


class Filter(Protocol):
    """Decides whether a finished group is worth training on. A function `(rewards, **settings)`."""

    def __call__(self, rewards: Sequence[float]) -> bool:
        """Args: rewards of the group's episodes. Returns: True to keep the group; False drops and replaces it."""


class Correction(Protocol):
    """Corrects for the distance between the policy that sampled and the one that learns. A function."""

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns: weights [T] float32 without gradients, 0 where a token is masked out (denominators stay as they
        are), and named flat [T] tensors whose masked mean is logged."""


class PolicyLoss(Protocol):
    """The loss of each token. A function `(terms, **settings)`."""

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns: loss [T] float32 with gradients (to minimise), and named flat [T] tensors whose masked mean is
        logged, such as `clip_fraction`."""


class Aggregation(Protocol):
    """How the tokens' losses are added up. A function `(loss_mask, row_index, rows, **settings)`."""

    def __call__(self, loss_mask: torch.Tensor, row_index: torch.Tensor, rows: int) -> torch.Tensor:
        """Computed once on all sequences of an optimizer update, so denominators are global.

        Returns:
            [T] float32, the weight of each token in the summed loss, 0 outside `loss_mask`.
        """


class Algorithm(Protocol):
    """What the trainer does with a batch. The trainer knows algorithms only by this interface.

    Attributes:
        needs_rollouts: whether batches come from the rollout controller; otherwise from the data set as they are.
        needs_reference: whether `prepare` reads a reference model.
        outputs: what the training engine must compute for `loss`.
        filter: for finished groups, or None.
    """

    needs_rollouts: bool
    needs_reference: bool
    outputs: Sequence[str]
    filter: Filter | None

    def prepare(self, batch: PackedBatch, forward: Mapping[str, Forward], updates: int) -> PackedBatch:
        """Once for each whole batch, before it is cut into minibatches.

        Args:
            batch: shifted.
            forward: by role (`actor`, `reference`), a pass without gradients over the batch.
            updates: optimizer updates that follow on this batch.

        Returns:
            The batch with `advantages` [T] and, where there are several updates, `proximal_logprobs` [T].
        """

    def weigh(self, minibatch: PackedBatch) -> PackedBatch:
        """Add what depends on all sequences of an update, so that denominators are global.

        Returns:
            The minibatch with `loss_weights` [T], each token's weight in the summed loss.
        """

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """The loss of a micro-batch, from what the engine computed for it."""
