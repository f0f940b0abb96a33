"""Settings of composed algorithms. An algorithm of a plugin is usually a subclass with its paper's defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component
from areal_core.interfaces.algorithm import ForwardPass
from areal_core.interfaces.model import ACTOR, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


TOKEN_AGGREGATIONS: Final = ("core/token_mean", "core/constant_length")
"""Loss aggregations in which the weight of a sequence grows with its tokens."""


class PolicyLossSettings(Settings):
    """Base class for the settings of a policy loss.

    Attributes:
        anchor: the policy in the denominator of the loss's ratio. The ratio to the behavior policy is already the whole
            importance weight: corrections may mask its tokens, but not weight them again. A loss without a ratio
            (`none`) is correct only for the first update on a batch.
        is_of_sequences: whether every token carries the loss of its whole sequence, which is averaged over sequences.

    Example:
        >>> from pydantic import Field
        >>> from areal_core.sdk import PolicyLossSettings
        >>> class WeightedSettings(PolicyLossSettings):
        ...     anchor = "behavior"  # its ratio is to the policy that sampled
        ...     highest: float = Field(2.0, gt=0, description="Upper bound of a token's importance weight.")
        >>> WeightedSettings(highest=3)
        WeightedSettings(highest=3.0)
    """

    anchor: ClassVar[Literal["proximal", "behavior", "none"]] = "proximal"
    is_of_sequences: ClassVar[bool] = False


class CorrectionSettings(Settings):
    """Base class for the settings of a correction.

    Attributes:
        only_masks: whether the correction returns a mask and no importance weights; see `areal_core.sdk.Correction`.

    Example:
        >>> from pydantic import Field
        >>> from areal_core.sdk import CorrectionSettings
        >>> class MaskSettings(CorrectionSettings):
        ...     only_masks = True  # so that losses which are anchored at the behavior policy may have it
        ...     highest: float = Field(2.0, gt=0, description="Ratio above which a token is masked.")
        >>> MaskSettings().highest
        2.0
    """

    only_masks: ClassVar[bool] = False


class BatchTransformSettings(Settings):
    """Base class for the settings of a batch transform.

    Attributes:
        belongs_in: the list of transforms that runs before its columns are read; None if both lists do.

    Example:
        >>> from pydantic import Field
        >>> from areal_core.sdk import BatchTransformSettings
        >>> class LengthPenaltySettings(BatchTransformSettings):
        ...     belongs_in = "batch_transforms"  # advantages read the reward, so it must change before them
        ...     per_token: float = Field(0.01, ge=0, description="Reward that each token costs.")
        >>> LengthPenaltySettings().per_token
        0.01
    """

    belongs_in: ClassVar[Literal["batch_transforms", "minibatch_transforms"] | None] = None


class PolicyGradientSettings(Settings):
    """`group filters ∘ passes ∘ advantage ∘ corrections ∘ loss ∘ aggregation`; subclasses set algorithms' defaults."""

    reward_shaping: list[Selection] = component(
        "reward_shaping",
        default=[],
        description="Functions that change the rewards of finished groups, in this order, before the group filters.",
    )
    group_filters: list[Selection] = component(
        "group_filters",
        default=[],
        description="Filters that drop finished groups or take answers out of the loss, in this order.",
    )
    batch_transforms: list[Selection] = component(
        "batch_transforms",
        default=[],
        description="Functions that compute fields of a whole batch before its advantages, in this order.",
    )
    advantage: Selection = component("advantages", description="Estimator that turns rewards into advantages.")
    proximal: Literal["recomputed", "behavior", "interpolated"] = Field(
        "recomputed",
        description="The proximal policy, from which ratios and corrections are computed. `recomputed`: the policy "
        "at the start of the batch, by a forward pass; with one update per batch it is the current policy, and no "
        "pass is needed. `behavior`: the policy that sampled, so there is nothing to correct. `interpolated`: "
        "between that policy and the current one, log-linearly by their versions (A-3PO, arXiv 2512.06547).",
    )
    minibatch_transforms: list[Selection] = component(
        "batch_transforms",
        default=[],
        description="Functions that compute fields of a minibatch just before its update, in this order.",
    )
    corrections: list[Selection] = component(
        "corrections",
        default=[],
        description="Off-policy corrections for the distance between the policy that sampled and the proximal "
        "policy. Their weights are multiplied.",
    )
    policy_loss: Selection = component("policy_losses", description="Loss of each token.")
    regularizers: list[Selection] = component(
        "regularizers", default=[], description="Terms added to the loss of each token, such as a KL penalty."
    )
    auxiliary_losses: list[Selection] = component(
        "auxiliary_losses",
        default=[],
        description="Losses that are trained in the same update as the policy, such as a critic's.",
    )
    loss_aggregation: Selection = component(
        "loss_aggregations", default="core/token_mean", description="How the losses of tokens are added up."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Number of first batches on which only the auxiliary losses are trained. The policy does not "
        "change, and no weights are synced.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The policy, and what it was at the start of the batch where several updates follow."""
        yield ACTOR
        if updates > 1 and self.proximal == "recomputed" and self._anchor != "behavior":
            yield ForwardPass(ACTOR, "logprobs", "proximal_logprobs")

    def idle_steps(self, role: str) -> int:
        """Batches from which a role learns nothing, so that its learning rate decays over the others alone."""
        return self.warmup_steps if role == ACTOR.name else 0

    @property
    def _is_of_sequences(self) -> bool:
        return getattr(self.policy_loss.settings, "is_of_sequences", False)

    @property
    def _anchor(self) -> str:
        return getattr(self.policy_loss.settings, "anchor", "proximal")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Mistakes that show only beside the rest of the run's config."""
        if config.workflow is None:
            yield "it learns from generated text, and nothing generates: set workflow and inference_engine"
        weighing = [c.target for c in self.corrections if not getattr(c.settings, "only_masks", False)]
        if self._anchor == "behavior" and weighing:
            yield (
                f"'{self.policy_loss.target}' has the ratio to the policy that sampled in it already, and "
                f"{', '.join(weighing)} would weigh by it twice; leave it out, or choose one that only masks"
            )
        for key in ("batch_transforms", "minibatch_transforms"):
            for one in getattr(self, key):
                home = one.settings.belongs_in if isinstance(one.settings, BatchTransformSettings) else None
                if home not in {None, key}:
                    yield f"'{one.target}' is in {key} and belongs in {home}, where its result is read"
        for key, value in self:
            parts = [part for part in value if isinstance(part, Selection)] if isinstance(value, list) else []
            for part in (part for number, part in enumerate(parts) if part in parts[:number]):
                yield f"'{part.target}' occurs twice in {key}, with the same settings: leave one out"
        if self.warmup_steps >= config.steps:
            yield f"warmup_steps is {self.warmup_steps} of {config.steps} steps: the policy would never learn"
        if self.warmup_steps and not self.auxiliary_losses:
            yield "warmup_steps is set, and nothing learns in them: there are no auxiliary losses"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """What works and is biased."""
        settings = [(c.target, c.settings) for c in self.corrections]
        weighing = [name for name, one in settings if isinstance(one, CorrectionSettings) and not one.only_masks]
        if len(weighing) > 1:
            yield (
                f"{' and '.join(weighing)} weigh by the ratio of the two policies each, and their weights multiply: "
                "keep one of them"
            )
        if self._is_of_sequences and self.loss_aggregation.target in TOKEN_AGGREGATIONS:
            yield (
                f"'{self.policy_loss.target}' is the loss of a whole sequence, and '{self.loss_aggregation.target}' "
                "counts it once for each token, so long answers count more than in its paper: set loss_aggregation: "
                "core/sequence_mean"
            )
        if self._anchor == "none" and config.training.updates > 1:
            yield (
                f"'{self.policy_loss.target}' has no importance ratio, and of {config.training.updates} updates on a "
                "batch all but the first learn from tokens that are no longer the policy's own: choose a loss such as "
                "grpo/ppo_clip, or training.num_minibatches: 1"
            )


class ConstantLengthSettings(Settings):
    """The denominator of Dr. GRPO."""

    length: int = Field(
        ge=1,
        description="Length L, in tokens, that the loss of every token is divided by. Usually sampling.max_new_tokens.",
    )
