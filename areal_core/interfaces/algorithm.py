"""An algorithm is `group filters ∘ passes ∘ advantage ∘ corrections ∘ loss ∘ aggregation`, each of them a component.

All of them are pure functions of packed tensors. Flat tensors have the shape [T], where T is the sum of the sequence
lengths of a (micro-)batch. Its keys per token are shifted: position t has the values of the token `targets[t]`.
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
    """Inputs of corrections, policy losses and regularizers: flat [T] tensors of whole sequences.

    Outside `mask` values may be infinite. areal removes the loss there, but a gradient of 0 times infinity is NaN:
    apply `.where(terms.mask, 0.0)` to a difference of log-probabilities before `exp` or a product.

    Attributes:
        logprobs: float32, current policy, with gradients.
        proximal_logprobs: float32, the policy at the start of the batch, detached: the center of clipping.
        behavior_logprobs: float32, the policy that sampled the token, as reported by the inference engine.
        advantages: float32.
        mask: bool, True for tokens that the policy sampled and learns from.
        row_index: int64, the sequence of each token.
        rows: number of sequences.
        entropy: float32 with gradients; None if the algorithm does not request it.
        top_logprobs: [T, K] float32 with gradients, log-probabilities under the current policy of the K tokens that
            were likeliest under the policy that sampled; K is `sampling.top_logprobs`. None unless the settings of a
            component have `needs_top_logprobs`.
        behavior_top_logprobs: [T, K] float32, the same under the policy that sampled, as reported by the inference
            engine.
        columns: all values per token of the batch by name, such as `reference_logprobs`.
    """

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    row_index: torch.Tensor
    rows: int
    entropy: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    behavior_top_logprobs: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a flat tensor over the tokens in `mask` of each sequence, [rows]; 0 if it has none."""
        count = values.new_zeros(self.rows).index_add(0, self.row_index, self.mask.to(values.dtype))
        return self.row_sum(values) / count.clamp(min=1)

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a flat tensor over the tokens in `mask` of each sequence, [rows]."""
        # Where the mask is off a value may be infinite: select, do not multiply.
        return values.new_zeros(self.rows).index_add(0, self.row_index, values.where(self.mask, 0.0))


@dataclass(slots=True)
class LossResult:
    """The loss of a micro-batch, summed over its tokens, with values to log.

    Attributes:
        loss: [] with gradients, to be minimized. The sum over micro-batches and ranks is the loss of the update.
        metrics: metrics of the micro-batch by name. The kind of each decides how micro-batches and ranks are combined.
        tokens: per-token values to log, [T] by name.
    """

    loss: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Advantage(Protocol):
    """Turns rewards into advantages. A function `(batch, **settings)`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged, group_mean
        >>> from areal_core.sdk import Advantage
        >>> def centered(batch, *, scale=1.0):
        ...     return scale * (batch["reward"] - group_mean(batch, batch["reward"]))
        >>> advantage: Advantage = centered
        >>> tokens = Ragged(torch.tensor([2, 1]), {"input_ids": torch.tensor([5, 6, 7])})
        >>> columns = {"reward": torch.tensor([1.0, 0.0]), "group_id": torch.tensor([3, 3])}
        >>> advantage(PackedBatch(tokens, {**columns, "episode_id": torch.tensor([0, 1])}))
        tensor([ 0.5000, -0.5000])
    """

    def __call__(self, batch: PackedBatch) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the advantages.

        Args:
            batch: the whole batch, with `reward` [B] float32, `group_id` and `episode_id` [B] int64, `loss_mask` [T]
                bool, and the columns of the passes that the settings need.

        Returns:
            [B] float32, one advantage for each sequence, or [T] float32, one for each token; or several columns by
            name, `advantages` among them.
        """


class Correction(Protocol):
    """Corrects for the distance between the policy that sampled and the policy that learns. A function
    `(terms, **settings)`.

    A mask removes a token's policy loss and leaves its regularizers, so that a penalty still holds the policy where it
    has moved furthest. An importance weight multiplies both, because both are means over tokens that another policy
    has sampled. Denominators do not change.

    Example:
        >>> import torch
        >>> from areal_core.sdk import Correction, PolicyTerms
        >>> def without_outliers(terms, *, highest=2.0):
        ...     ratio = (terms.proximal_logprobs - terms.behavior_logprobs).exp()
        ...     return ratio <= highest, {"ratio": ratio}
        >>> correction: Correction = without_outliers
        >>> new, old, mask = torch.tensor([-0.5, -1.0]), torch.tensor([-2.0, -1.0]), torch.tensor([True, True])
        >>> terms = PolicyTerms(new, new, old, torch.ones(2), mask, row_index=torch.tensor([0, 0]), rows=1)
        >>> correction(terms)[0]
        tensor([False,  True])
    """

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a mask [T] bool, False for tokens to leave out, or importance weights [T] float32 without gradients
        (a weight of 0 masks, as False does); and named flat [T] tensors whose masked mean is logged."""


class PolicyLoss(Protocol):
    """The loss of each token. A function `(terms, **settings)`.

    Example:
        >>> import torch
        >>> from areal_core.sdk import PolicyLoss, PolicyTerms
        >>> def reinforce(terms):
        ...     return -terms.logprobs * terms.advantages, {"probability": terms.logprobs.detach().exp()}
        >>> loss: PolicyLoss = reinforce
        >>> new, mask = torch.tensor([-0.5, -1.0], requires_grad=True), torch.tensor([True, True])
        >>> old, advantages = new.detach(), torch.tensor([2.0, -1.0])
        >>> losses, logged = loss(PolicyTerms(new, old, old, advantages, mask, row_index=torch.tensor([0, 0]), rows=1))
        >>> losses.tolist()
        [1.0, -1.0]
    """

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss [T] float32 with gradients (to minimize), and named flat [T] tensors whose masked mean is
        logged, such as `clip_fraction`."""


class Regularizer(Protocol):
    """A term that is added to the loss of each token, such as a KL penalty. A function `(terms, **settings)`.

    Example:
        >>> import torch
        >>> from areal_core.sdk import PolicyTerms, Regularizer
        >>> def entropy_bonus(terms, *, weight=0.5):
        ...     return -weight * terms.entropy, {}
        >>> regularizer: Regularizer = entropy_bonus
        >>> zeros, mask, entropy = torch.zeros(2), torch.tensor([True, True]), torch.tensor([2.0, 1.0])
        >>> terms = PolicyTerms(zeros, zeros, zeros, zeros, mask, torch.tensor([0, 0]), rows=1, entropy=entropy)
        >>> regularizer(terms)[0]
        tensor([-1.0000, -0.5000])
    """

    def __call__(self, terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the term [T] float32 with gradients, and named flat [T] tensors whose masked mean is logged."""


class LossAggregation(Protocol):
    """Decides how the losses of tokens are added up. A function `(minibatch, **settings)`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.sdk import LossAggregation
        >>> def summed(minibatch):
        ...     return minibatch["loss_mask"].float()
        >>> aggregation: LossAggregation = summed
        >>> columns = {"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([False, True, True])}
        >>> aggregation(PackedBatch(Ragged(torch.tensor([3]), columns)))
        tensor([0., 1., 1.])
    """

    def __call__(self, minibatch: PackedBatch) -> torch.Tensor:
        """Return the weight of each token in the summed loss, [T] float32, 0 outside `loss_mask`.

        Args:
            minibatch: all sequences of an optimizer update, so that denominators are global.
        """


class RewardShaping(Protocol):
    """Changes the rewards of a finished group, in the rollout worker. A function `(episodes, **settings)`, or a
    coroutine.

    Example:
        >>> from dataclasses import replace
        >>> from areal_core.data import Episode, FinishReason, Generation, Trajectory
        >>> from areal_core.sdk import RewardShaping
        >>> def clipped(episodes, *, highest=1.0):
        ...     return [replace(episode, reward=min(episode.reward, highest)) for episode in episodes]
        >>> shaping: RewardShaping = clipped
        >>> trajectory = Trajectory.from_generation([5], Generation([7], [-0.1], [0], FinishReason.STOP))
        >>> [episode.reward for episode in shaping([Episode([trajectory], 0.5), Episode([trajectory], 3.0)])]
        [0.5, 1.0]
    """

    def __call__(self, episodes: Sequence[Episode]) -> Sequence[Episode] | Awaitable[Sequence[Episode]]:
        """Return the episodes with other rewards.

        Args:
            episodes: episodes of one prompt that have not failed. Do not change them in place.

        Returns:
            As many episodes in the same order, with other rewards.
        """


class GroupFilter(Protocol):
    """Decides whether a finished group is trained on, and on which of its tokens, in the rollout worker. A function
    `(episodes, **settings)`, or a coroutine.

    Example:
        >>> from areal_core.data import Episode, FinishReason, Generation, Trajectory
        >>> from areal_core.sdk import GroupFilter
        >>> def not_all_equal(episodes):
        ...     return episodes if len({episode.reward for episode in episodes}) > 1 else None
        >>> group_filter: GroupFilter = not_all_equal
        >>> trajectory = Trajectory.from_generation([5], Generation([7], [-0.1], [0], FinishReason.STOP))
        >>> group_filter([Episode([trajectory], 1.0), Episode([trajectory], 1.0)]) is None
        True
    """

    def __call__(self, episodes: Sequence[Episode]) -> Sequence[Episode] | Awaitable[Sequence[Episode] | None] | None:
        """Return the episodes to train on, or None.

        Args:
            episodes: episodes of one prompt, with shaped rewards. Do not change them in place.

        Returns:
            As many episodes in the same order. A smaller `loss_mask` leaves tokens out. None drops the group, and
            another prompt replaces it.
        """


class ExampleTokenizer(Protocol):
    """Turns a row of a data set into the sequences to learn from. A function `(row, tokenizer, **settings)`.

    Example:
        >>> from types import SimpleNamespace
        >>> from areal_core.data import FinishReason, Generation, Trajectory
        >>> from areal_core.sdk import ExampleTokenizer
        >>> def completion_only(row, tokenizer):
        ...     texts = row["prompt"], row["completion"]
        ...     prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        ...     answer = [*answer, tokenizer.eos_token_id]
        ...     sampled = Generation(answer, [0.0] * len(answer), [-1] * len(answer), FinishReason.STOP)
        ...     return [Trajectory.from_generation(prompt, sampled)]
        >>> example_tokenizer: ExampleTokenizer = completion_only
        >>> encode = lambda text, add_special_tokens: [ord(character) for character in text]
        >>> characters = SimpleNamespace(encode=encode, eos_token_id=0)
        >>> [sequence] = example_tokenizer({"prompt": "6*7=", "completion": "42"}, characters)
        >>> sequence.tokens["loss_mask"].tolist()
        [False, False, False, False, True, True, True]
    """

    def __call__(self, row: Mapping[str, Any], tokenizer: Any) -> Sequence[Trajectory]:
        """Return the sequences of one row, which form one unit: one of a conversation, two of a preference.

        Raises:
            KeyError, ValueError, TypeError: the row has another form. The message describes the form that is needed.
        """


class BatchTransform(Protocol):
    """Computes columns from a batch, in the trainer. A function `(batch, context, **settings)`.

    Its settings may derive from `areal_core.sdk.BatchTransformSettings`, which restricts it to one of the two lists,
    `batch_transforms` or `minibatch_transforms`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.sdk import BatchTransform
        >>> def length_penalty(batch, context, *, per_token=0.25):
        ...     mask, row = batch["loss_mask"].float(), batch.tokens.row_index
        ...     sampled = mask.new_zeros(len(batch)).index_add(0, row, mask)  # tokens of each answer
        ...     return {"reward": batch["reward"] - per_token * sampled}
        >>> transform: BatchTransform = length_penalty
        >>> tokens = Ragged(torch.tensor([2, 1]), {"loss_mask": torch.tensor([False, True, False])})
        >>> transform(PackedBatch(tokens, {"reward": torch.tensor([1.0, 1.0])}), context=None)
        {'reward': tensor([0.7500, 1.0000])}
    """

    def __call__(self, batch: PackedBatch, context: Context) -> Mapping[str, torch.Tensor]:
        """Return columns to add or replace by name, [T], [B] or [U] for tokens, sequences or units."""


class AuxiliaryLoss(Protocol):
    """A loss of another role in the update of the policy, such as a critic's. A function
    `(minibatch, context, **settings)`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.sdk import CRITIC, AuxiliaryLoss, Loss, LossResult, LossSpec
        >>> def squared_error(part, outputs):
        ...     error = outputs["values"] - part["returns"]
        ...     return LossResult((error.square() * part["loss_weights"]).sum())
        >>> def regression(minibatch, context):
        ...     loss: Loss = squared_error
        ...     return LossSpec(CRITIC.name, minibatch, ("values",), loss)
        >>> auxiliary: AuxiliaryLoss = regression
        >>> ids, halves = torch.tensor([5, 6]), torch.tensor([0.5, 0.5])
        >>> columns = {"input_ids": ids, "returns": torch.ones(2), "loss_weights": halves}
        >>> spec = auxiliary(PackedBatch(Ragged(torch.tensor([2]), columns)), context=None)
        >>> spec.loss(spec.batch, {"values": torch.tensor([1.0, 3.0])}).loss
        tensor(2.)
    """

    def __call__(self, minibatch: PackedBatch, context: Context) -> LossSpec:
        """Return what a role learns in the update.

        Args:
            minibatch: all sequences of the update, with all columns and `loss_weights` [T] float32.
            context: of the batch.
        """


Loss = Callable[["PackedBatch", Mapping[str, "torch.Tensor"]], LossResult]
"""The loss of a micro-batch: a function of the micro-batch and of the engine's outputs for it, [T] by name."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What one role learns in one optimizer update.

    Attributes:
        role: name of the role.
        batch: the sequences of the update, with shifted keys per token.
        outputs: outputs that the engine must compute for `loss`, such as `logprobs`.
        loss: called for each micro-batch. Whatever depends on the whole update, such as a denominator, is in `batch`.
    """

    role: str
    batch: PackedBatch
    outputs: Sequence[str]
    loss: Loss


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A column that a component reads, and that a model computes without gradients before the advantages.

    Attributes:
        role: the model.
        output: `logprobs`, `entropy`, `values`, `sum_pi_squared`, or `divergence:ROLE:BETA` of a `ComparingEngine`; see
            `TrainEngine.forward`.
        column: name of the column in the batch, [T] float32.
    """

    role: Role
    output: str
    column: str


class Context(Protocol):
    """The trainer's services for an algorithm, for one batch."""

    @property
    def step(self) -> int:
        """Number of batches that were trained on before."""

    @property
    def version(self) -> int:
        """Weight version of the policy at the start of the batch, as in the column `versions`."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates on this batch. A batch with fewer groups has fewer updates."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Tensors of the algorithm by names such as `kl/coefficient`. They are saved with each checkpoint."""

    def forward(self, role: str, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return a role's outputs for a batch, without gradients, float32 [T] on the CPU; see `TrainEngine.forward`."""

    def minibatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """Yield the parts of the batch for the `updates`. Each epoch divides the groups at random; see `training`."""

    def log(self, name: str, metric: Metric) -> None:
        """Add a metric of the step. A second one with the same name is combined with the first."""


class Algorithm(Protocol):
    """Turns a batch into optimizer updates. The trainer knows algorithms only by this interface.

    The roles are those that the settings of the algorithm and of its components need (`Settings.needs`).

    Attributes:
        encode: turns rows of the data set into sequences; None if batches come from rollouts.
        group_filters: functions for finished groups, in order: reward shaping, then filters.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.sdk import ACTOR, Algorithm, LossResult, LossSpec, token_mean
        >>> class Imitation:
        ...     encode, group_filters = None, ()
        ...
        ...     def prepare(self, batch, context):
        ...         return batch.with_tokens(loss_weights=token_mean(batch))
        ...
        ...     def updates(self, batch, context):
        ...         yield [LossSpec(ACTOR.name, batch, ("logprobs",), self.loss)]
        ...
        ...     def loss(self, part, outputs):
        ...         return LossResult(-(outputs["logprobs"] * part["loss_weights"]).sum())
        >>> algorithm: Algorithm = Imitation()
        >>> columns = {"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([True, True, False])}
        >>> batch = algorithm.prepare(PackedBatch(Ragged(torch.tensor([3]), columns)), context=None)
        >>> [[spec]] = algorithm.updates(batch, context=None)  # one update, in which one role learns
        >>> spec.loss(spec.batch, {"logprobs": torch.tensor([-1.0, -2.0, 0.0])}).loss
        tensor(1.5000)
    """

    encode: ExampleTokenizer | None
    group_filters: Sequence[GroupFilter]

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Compute columns of the whole batch, such as advantages, and return it. Its keys per token are shifted."""

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield what each role learns, one optimizer update after another.

        The roles learn before the next update is requested, so that `context.forward` then uses the new weights.
        """
