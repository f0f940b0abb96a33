"""Settings of policy losses, regularizers and minibatch transforms. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from areal_core.config import Settings
from areal_core.sdk import ACTOR, REFERENCE, BatchTransformSettings, ForwardPass, PolicyLossSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig, Selection
    from areal_core.sdk import Role


class ClippingSettings(PolicyLossSettings):
    """Settings of losses with a ratio to the proximal policy. With one update per batch this ratio is always 1.

    Attributes:
        needs_updates: whether the loss is that of `ppo_clip` while the ratio is 1, so that choosing it changes nothing.
    """

    needs_updates: ClassVar[bool] = True

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note what has no effect with one update per batch, because the ratio is then always 1."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        written = sorted(name for name in self.model_fields_set if getattr(self, name) != defaults[name])
        proximal = getattr(config.algorithm.settings, "proximal", "recomputed")
        updates = config.training.num_minibatches * config.training.num_epochs
        if updates != 1 or proximal != "recomputed":
            return
        if self.needs_updates:
            loss = getattr(config.algorithm.settings, "policy_loss", None)
            yield (
                f"policy_loss '{getattr(loss, 'target', '')}' has the gradient of ppo_clip while every ratio is 1, as "
                "with one update per batch: set training.num_minibatches to 4, for example"
            )
        elif written:
            yield (
                f"{' and '.join(written)} without effect: with one update per batch every ratio is 1, so nothing is "
                "clipped; see training.num_minibatches and training.num_epochs"
            )


class ReinforceSettings(PolicyLossSettings):
    """Settings of `losses.reinforce`, which has none."""

    anchor = "none"


class PPOClipSettings(ClippingSettings):
    """Settings of `losses.ppo_clip`."""

    needs_updates: ClassVar[bool] = False
    clip_low: float = Field(
        0.2, ge=0, le=1, description="Lower clip range: a token gains nothing from a ratio below 1 - clip_low."
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description="Upper clip range: a token gains nothing from a ratio above 1 + clip_high. DAPO uses 0.28.",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Dual clip (arXiv 1912.09729): bounds the loss of a negative advantage A by this factor times "
        "its absolute value. Usually 3. null: no bound.",
    )


class SAPOLossSettings(ClippingSettings):
    """Settings of `losses.sapo`."""

    temperature_positive: float = Field(
        1.0,
        gt=0,
        description="Temperature τ of the gate for positive advantages. The higher it is, the faster the gradient "
        "fades as the ratio moves away from 1.",
    )
    temperature_negative: float = Field(
        1.05,
        gt=0,
        description="Temperature τ of the gate for other advantages. The paper (arXiv 2511.20347) sets it higher, "
        "because their gradients do more harm.",
    )


class GSPOLossSettings(ClippingSettings):
    """Settings of `sequence_losses.gspo`. Use it with `core/sequence_mean`, as the algorithm `gspo` does."""

    is_of_sequences = True
    clip_low: float = Field(
        3e-4, ge=0, le=1, description="Lower clip range: a sequence gains nothing from a ratio below 1 - clip_low."
    )
    clip_high: float = Field(
        4e-4, ge=0, description="Upper clip range: a sequence gains nothing from a ratio above 1 + clip_high."
    )


class GMPOLossSettings(ClippingSettings):
    """Settings of `sequence_losses.gmpo`. Use it with `core/sequence_mean`, as the algorithm `gmpo` does."""

    is_of_sequences = True
    clip_low: float = Field(
        0.4, ge=0, description="Lower clip range of log-ratios: a token gains nothing from one below -clip_low."
    )
    clip_high: float = Field(
        0.4, ge=0, description="Upper clip range of log-ratios: a token gains nothing from one above clip_high."
    )


class CISPOLossSettings(ClippingSettings):
    """Settings of `weighted_losses.cispo`."""

    clip_low: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Lower clip range: the smallest weight of a token is 1 - clip_low. 1: no lower bound.",
    )
    clip_high: float = Field(
        4.0,
        ge=0,
        description="Upper clip range: the largest weight of a token is 1 + clip_high. The paper (arXiv 2506.13585) "
        "tunes it and does not state its value.",
    )


class DPPOLossSettings(PolicyLossSettings):
    """Settings of `weighted_losses.dppo`."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="Divergence between the current policy and the policy that sampled, from the sampled token "
        "alone. `tv`: absolute difference of its two probabilities. `kl`: KL divergence of the two Bernoulli "
        "distributions, which needs lower thresholds: verl's example has 0.05 for `kl`, and 0.15 for `tv`.",
    )
    threshold_low: float = Field(
        0.2,
        gt=0,
        description="Upper bound of the divergence for tokens with a negative advantage. Its scale depends on "
        "`divergence`.",
    )
    threshold_high: float = Field(
        0.2,
        gt=0,
        description="Upper bound of the divergence for tokens with a positive advantage. Its scale depends on "
        "`divergence`.",
    )
    cap: float = Field(20.0, ge=1, description="Upper bound of a token's weight, the ratio to the policy that sampled.")

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that the default thresholds are those of the other divergence."""
        if self.divergence == "kl" and not {"threshold_low", "threshold_high"} <= self.model_fields_set:
            yield "the default thresholds of dppo, 0.2, are for divergence tv: for kl set both, to 0.05 for example"


class RolloutImportanceSettings(PolicyLossSettings):
    """Settings of `weighted_losses.rollout_importance`."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    clip_low: float | None = Field(
        0.2, gt=0, le=1, description="Tokens with a ratio of 1 - clip_low or less are masked. null: no lower bound."
    )
    clip_high: float | None = Field(
        0.28, gt=0, description="Tokens with a ratio of 1 + clip_high or more are masked. null: no upper bound."
    )


class VESPOLossSettings(PolicyLossSettings):
    """Settings of `weighted_losses.vespo`. The defaults are those of the paper's authors and of TRL."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    k_positive: float = Field(
        2.0,
        gt=0,
        description="Exponent k for advantages of 0 or more. The higher it is, the faster the weight fades as the "
        "sequence's ratio falls below 1.",
    )
    lambda_positive: float = Field(
        3.0,
        gt=0,
        description="Decay λ for advantages of 0 or more. The higher it is, the faster the weight fades as the "
        "sequence's ratio rises above 1.",
    )
    k_negative: float = Field(3.0, gt=0, description="Exponent k for negative advantages.")
    lambda_negative: float = Field(2.0, gt=0, description="Decay λ for negative advantages.")


class ScoreCenteringSettings(PolicyLossSettings):
    """Settings of `score_centering.score_centering`. The number of tokens in the head is sampling.top_logprobs."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    needs_top_logprobs: ClassVar[bool] = True
    cap: float | None = Field(
        None,
        gt=0,
        description="Upper bound of a token's importance weight, the ratio of the current policy to the policy that "
        "sampled. The weighted score is centered. null: no importance weights, for batches without stale tokens.",
    )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that without a cap nothing corrects for stale tokens and for further updates on a batch."""
        if self.cap is None and (config.training.updates > 1 or config.rollout.max_staleness > 0):
            yield (
                "score_centering without a cap has no importance weights, so stale tokens and further updates on a "
                "batch count as if the current policy had sampled them: set policy_loss.cap to 2, for example"
            )


class ReferenceKLSettings(Settings):
    """Settings of `regularizers.reference_kl`."""

    coefficient: float = Field(0.04, gt=0, description="KL coefficient β. GRPO's paper uses 0.04.")
    estimator: Literal["k2", "k3", "unbiased"] = Field(
        "unbiased",
        description="Estimator of the KL divergence, with d = log policy - log reference. `k2`: d²/2, with the "
        "gradient of KL(policy ‖ reference). `k3`: exp(-d) - 1 + d, with the gradient of KL(reference ‖ policy) "
        "(GRPO's paper, verl). `unbiased`: k3 times the ratio to the proximal policy, with the gradient of "
        "KL(policy ‖ reference) (DeepSeek-V3.2, TRL since 1.16).",
    )

    @field_validator("estimator", mode="before")
    @classmethod
    def _refuse_k1(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 (d itself) has a gradient of 0 in expectation, so in a loss it only adds noise; choose k2 or "
                "unbiased for the gradient of KL(policy ‖ reference), k3 for that of KL(reference ‖ policy), or put k1 "
                "into the reward: batch_transforms: [kl_in_reward]"
            )
        return value

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward pass that computes the reference's log-probabilities."""
        return (ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),)

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the loss has a proximal policy if the estimator is `unbiased`, which needs the ratio to it."""
        loss: Any = getattr(config.algorithm.settings, "policy_loss", None)
        anchor = getattr(getattr(loss, "settings", None), "anchor", "proximal")
        if self.estimator == "unbiased" and anchor == "behavior" and config.training.updates > 1:
            yield f"unbiased needs the ratio to the proximal policy, which '{loss.target}' lacks; choose k2 or k3"


class EntropyBonusSettings(Settings):
    """Settings of `regularizers.entropy_bonus`."""

    coefficient: float = Field(0.01, description="Entropy coefficient η. Positive: more exploration. Negative: less.")


class M2POTransformSettings(BatchTransformSettings):
    """Settings of `minibatch_transforms.m2po`."""

    belongs_in = "minibatch_transforms"

    threshold: float = Field(
        0.04,
        gt=0,
        description="Maximum mean squared log-ratio of an update's tokens, in squared nats. The tokens with the "
        "largest log-ratios are masked until it is met.",
    )
    among: Literal["trust_region", "all"] = Field(
        "trust_region",
        description="Tokens that are averaged and may be masked. `trust_region`: those that the update would move "
        "further from the policy that sampled, as in the paper (arXiv 2510.01161). `all`: every token, as in AReaL.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the policy, because the transform itself requests a forward pass just before each update."""
        return (ACTOR,)


class EntropyTargetSettings(Settings):
    """Settings of `minibatch_transforms.entropy_target`."""

    target: float = Field(0.2, gt=0, description="Target entropy of the policy, in nats per token.")
    step: float = Field(0.005, gt=0, description="Amount by which the entropy coefficient changes with each update.")
    maximum: float = Field(1.0, gt=0, description="Upper bound of the entropy coefficient.")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the policy, because the transform itself requests its entropy."""
        return (ACTOR,)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that the coefficient has no effect without a regularizer."""
        if not getattr(config.algorithm.settings, "regularizers", ()):
            yield "entropy_target sets a coefficient that nothing reads: add regularizers: [adaptive_entropy]"


class AdaptiveEntropySettings(Settings):
    """Settings of `regularizers.adaptive_entropy`, which has none. A minibatch transform sets its coefficient."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that a transform sets the coefficient."""
        transforms: list[Selection] = getattr(config.algorithm.settings, "minibatch_transforms", [])
        # A transform that is named by import may set it.
        if all(transform.record is not None and transform.target != "grpo/entropy_target" for transform in transforms):
            yield "adaptive_entropy reads a coefficient that nothing sets: add minibatch_transforms: [entropy_target]"
