"""An algorithm is `group filters ∘ passes ∘ advantage ∘ corrections ∘ loss ∘ aggregation`, each of them a component.

All of them are pure functions of packed tensors. Flat tensors have the shape [T], where T is the sum of the sequence
lengths of a (micro-)batch whose per-token keys are shifted: position t is about `targets[t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    import torch

    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric
    from areal_core.data.trajectory import Episode, Trajectory
    from areal_core.interfaces.model import Role


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What corrections and policy losses are computed from; flat [T] tensors of whole sequences.

    Attributes:
        logprobs: float32, current policy, with gradients.
        proximal_logprobs: float32, the policy at the start of the batch, detached: the center of clipping.
        behavior_logprobs: float32, the policy that sampled the token, as the inference engine reported it.
        advantages: float32.
        mask: bool, the token was sampled by the policy and is learned from.
        row_index: int64, the sequence of each token.
        rows: how many sequences.
        entropy: float32 with gradients, where the algorithm asked for it.
        columns: everything else that the batch has for each token, such as `reference_logprobs`.
    """

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    row_index: torch.Tensor
    rows: int
    entropy: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

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
    """A loss to minimize, summed over a micro-batch, with what to log.

    Attributes:
        loss: [] with gradients; the sum over micro-batches and ranks is the loss of the update.
        metrics: of the micro-batch, by name; each says by its kind how micro-batches and ranks are put together.
        tokens: per-token values to log, [T] by name.
    """

    loss: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Advantage(Protocol):
    """Turns rewards into advantages. A function `(batch, **settings)`."""

    def __call__(self, batch: PackedBatch) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Args: batch, the whole batch, with `reward` [B], `group_id`, `episode_id`, `loss_mask`, and the columns of
        the passes that its settings need.

        Returns:
            [B] float32, one advantage for each sequence, or [T] float32, one for each token; or several columns by
            name, `advantages` among them.
        """


class Correction(Protocol):
    """Corrects for the distance between the policy that sampled and the one that learns. A function
    `(terms, **settings)`.

    A mask removes a token's policy loss and leaves its regularizers, so that a penalty still holds the policy where it
    has moved furthest. An importance weight multiplies both, because both are means over tokens that another policy
    has sampled. Denominators stay as they are.
    """

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns: a mask [T] bool, False for tokens to leave out, or importance weights [T] float32 without gradients
        (a weight of 0 masks, as False does); and named flat [T] tensors whose masked mean is logged."""


class PolicyLoss(Protocol):
    """The loss of each token. A function `(terms, **settings)`."""

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns: loss [T] float32 with gradients (to minimize), and named flat [T] tensors whose masked mean is
        logged, such as `clip_fraction`."""


class Regularizer(Protocol):
    """A term that is added to the loss of each token. A function `(terms, **settings)`; as `PolicyLoss`."""

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns: loss [T] float32 with gradients, and named flat [T] tensors whose masked mean is logged."""


class LossAggregation(Protocol):
    """How the tokens' losses are added up. A function `(minibatch, **settings)`."""

    def __call__(self, minibatch: PackedBatch) -> torch.Tensor:
        """Computed once on all sequences of an optimizer update, so denominators are global.

        Returns:
            [T] float32, the weight of each token in the summed loss, 0 outside `loss_mask`.
        """


class RewardShaping(Protocol):
    """Changes the rewards of a finished group, in the rollout worker. A function `(episodes, **settings)`, or a
    coroutine."""

    def __call__(self, episodes: Sequence[Episode]) -> Sequence[Episode] | Awaitable[Sequence[Episode]]:
        """Args: episodes of one prompt that ended well; they are not to be changed in place.

        Returns:
            As many episodes in the same order, with other rewards.
        """


class GroupFilter(Protocol):
    """Says whether a finished group is trained on, and which of its tokens are, in the rollout worker. A function
    `(episodes, **settings)`, or a coroutine."""

    def __call__(self, episodes: Sequence[Episode]) -> Sequence[Episode] | Awaitable[Sequence[Episode] | None] | None:
        """Args: episodes of one prompt, their rewards shaped; they are not to be changed in place.

        Returns:
            As many episodes in the same order, with other loss masks where some are left out; None drops the group, and
            another prompt takes its place.
        """


class ExampleTokenizer(Protocol):
    """Turns a row of a data set into what is learned from it. A function `(row, tokenizer, **settings)`."""

    def __call__(self, row: Mapping[str, Any], tokenizer: Any) -> Sequence[Trajectory]:
        """Returns: the sequences of one row, which form one unit: one of a conversation, two of a preference.

        Raises:
            KeyError, ValueError, TypeError: the row has another form; the message says which one is needed.
        """


class BatchTransform(Protocol):
    """Computes columns from a batch, in the trainer. A function `(batch, context, **settings)`.

    Settings derived from `areal_core.algorithms.settings.BatchTransformSettings` may say into which list it belongs.
    """

    def __call__(self, batch: PackedBatch, context: Context) -> Mapping[str, torch.Tensor]:
        """Returns: columns to add or replace, [T], [B] or [U]."""


class AuxiliaryLoss(Protocol):
    """What an update learns beside the policy, such as a critic. A function `(minibatch, context, **settings)`."""

    def __call__(self, minibatch: PackedBatch, context: Context) -> LossSpec:
        """Args: minibatch, with all columns and `loss_weights` [T]. Returns: a role's part of the update."""


Loss = Callable[["PackedBatch", Mapping[str, "torch.Tensor"]], LossResult]
"""The loss of a micro-batch, from its columns and from what the engine has computed for it, by name."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What one role learns in one optimizer update.

    Attributes:
        role: its name.
        batch: shifted.
        outputs: what the engine must compute for `loss`.
        loss: called for each micro-batch; all that depends on the whole update, such as a denominator, is in `batch`.
    """

    role: str
    batch: PackedBatch
    outputs: Sequence[str]
    loss: Loss


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A column that a component reads and a model has to compute, without gradients, before advantages are.

    Attributes:
        role: the model.
        output: `logprobs`, `entropy`, `values`, or `divergence:ROLE:BETA` of a `ComparingEngine`.
        column: what the batch shall call it, [T] float32.
    """

    role: Role
    output: str
    column: str


class Context(Protocol):
    """What the trainer offers an algorithm for one batch."""

    @property
    def step(self) -> int:
        """Batches that were trained on before."""

    @property
    def version(self) -> int:
        """Of the weights that the policy had at the start of the batch, as the column `versions` counts them."""

    @property
    def updates(self) -> int:
        """Optimizer updates that follow on this batch; fewer where it has fewer groups than that."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that are the algorithm's own, saved with each checkpoint; by names such as `kl/coefficient`."""

    def forward(self, role: str, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """A role's outputs on a batch, without gradients, float32 [T] on the CPU; see `TrainEngine.forward`."""

    def minibatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """The batch cut into `updates` parts by whole groups, anew in each epoch over it, as `training` says."""

    def log(self, name: str, metric: Metric) -> None:
        """Add to the step's metrics."""


class Algorithm(Protocol):
    """What the trainer does with a batch. It knows algorithms only by this interface, and roles only by their names.

    The roles come from what the settings of the algorithm and of its components need (`Settings.needs`).

    Attributes:
        encode: turns rows of the data set into batches; None where batches come from rollouts.
        group_filters: for finished groups, in order: reward shaping, then filters.
    """

    encode: ExampleTokenizer | None
    group_filters: Sequence[GroupFilter]

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Once for each whole batch: passes and advantages. The batch is shifted."""

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """The work of each optimizer update, one after another: each role's parts are learned before the next update is
        asked for, so that `context.forward` then answers with what was learned."""
