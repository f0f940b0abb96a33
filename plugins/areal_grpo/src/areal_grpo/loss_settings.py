"""Settings of policy losses, regularizers and minibatch transforms. Imports no torch, as `areal_grpo.config`."""

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
    """The base of losses whose ratio is to the proximal policy, so that with one update on a batch it is 1."""

    def notes(self, config: RunConfig) -> Iterable[str]:
        """With one update on a batch the policy is the proximal one: the ratio is 1, and nothing is ever clipped."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        written = sorted(name for name in self.model_fields_set if getattr(self, name) != defaults[name])
        proximal = getattr(config.algorithm.settings, "proximal", "recomputed")
        updates = config.training.num_minibatches * config.training.num_epochs
        if written and updates == 1 and proximal == "recomputed":
            yield (
                f"{' and '.join(written)} without effect: with one update on a batch every ratio is 1, so nothing is "
                "clipped; see training.num_minibatches and training.num_epochs"
            )


class ReinforceSettings(PolicyLossSettings):
    """`losses.reinforce` has none."""

    anchor = "none"


class PPOClipSettings(ClippingSettings):
    """Settings of `losses.ppo_clip`."""

    clip_low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - clip_low gain nothing more")
    clip_high: float = Field(0.2, ge=0, description="ratios above 1 + clip_high gain nothing more; DAPO has 0.28")
    dual_clip: float | None = Field(
        None, gt=1, description="bounds the loss of a negative advantage by this factor, usually 3; null does not"
    )


class SAPOLossSettings(ClippingSettings):
    """Settings of `losses.sapo`."""

    temperature_positive: float = Field(
        1.0, gt=0, description="τ for positive advantages: the higher, the faster the gradient fades away from ratio 1"
    )
    temperature_negative: float = Field(
        1.05, gt=0, description="τ for the others; the paper has it the higher one, since they do the more harm"
    )


class GSPOLossSettings(ClippingSettings):
    """Settings of `sequence_losses.gspo`. Averaged by `core/sequence_mean`, as the algorithm `gspo` does."""

    is_of_sequences = True
    clip_low: float = Field(3e-4, ge=0, le=1, description="sequence ratios below 1 - clip_low gain nothing more")
    clip_high: float = Field(4e-4, ge=0, description="sequence ratios above 1 + clip_high gain nothing more")


class GMPOLossSettings(ClippingSettings):
    """Settings of `sequence_losses.gmpo`. Averaged by `core/sequence_mean`, as the algorithm `gmpo` does."""

    is_of_sequences = True
    clip_low: float = Field(0.4, ge=0, description="log-ratios below -clip_low gain nothing more")
    clip_high: float = Field(0.4, ge=0, description="log-ratios above clip_high gain nothing more")


class CISPOLossSettings(ClippingSettings):
    """Settings of `weighted_losses.cispo`."""

    clip_low: float = Field(1.0, ge=0, le=1, description="the least weight is 1 - clip_low; 1: no bound")
    clip_high: float = Field(
        4.0, ge=0, description="the greatest weight is 1 + clip_high; the paper tunes it and does not tell its value"
    )


class DPPOLossSettings(PolicyLossSettings):
    """Settings of `weighted_losses.dppo`."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="how far the policy is from the one that sampled, by the sampled token: tv is the difference of "
        "its two probabilities, kl the divergence of the two Bernoulli distributions",
    )
    threshold_low: float = Field(0.2, gt=0, description="for negative advantages; it means another thing for tv and kl")
    threshold_high: float = Field(0.2, gt=0, description="for positive advantages")
    cap: float = Field(20.0, ge=1, description="the greatest weight of a token")


class RolloutImportanceSettings(PolicyLossSettings):
    """Settings of `weighted_losses.rollout_importance`."""

    anchor: ClassVar[Literal["proximal", "behavior"]] = "behavior"
    clip_low: float | None = Field(
        0.2, gt=0, le=1, description="tokens whose ratio is 1 - clip_low or less are not learned from; null: no bound"
    )
    clip_high: float | None = Field(
        0.28, gt=0, description="tokens whose ratio is 1 + clip_high or more are not learned from; null: no bound"
    )


class ReferenceKLSettings(Settings):
    """Settings of `regularizers.reference_kl`."""

    coefficient: float = Field(0.04, gt=0, description="β; 0.04 is GRPO's")
    estimator: Literal["k2", "k3", "unbiased"] = Field(
        "unbiased",
        description="with d = log policy - log reference: k2 is d²/2, its gradient that of KL(policy ‖ reference); "
        "k3 is exp(-d) - 1 + d, its gradient that of KL(reference ‖ policy) (GRPO's paper, verl); unbiased is k3 times "
        "the ratio to the proximal policy, its gradient that of KL(policy ‖ reference) (DeepSeek-V3.2, TRL since 1.16)",
    )

    @field_validator("estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 (d itself) has a gradient of 0 in expectation, so in a loss it pulls nowhere and only adds noise; "
                "choose k2 or unbiased for the gradient of KL(policy ‖ reference), k3 for that of "
                "KL(reference ‖ policy), or put k1 into the reward: batch_transforms: [kl_in_reward]"
            )
        return value

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the reference says of each token."""
        return (ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),)

    def check(self, config: RunConfig) -> Iterable[str]:
        """The unbiased estimate needs the ratio to the proximal policy, which such losses do without."""
        loss: Any = getattr(config.algorithm.settings, "policy_loss", None)
        anchor = getattr(getattr(loss, "settings", None), "anchor", "proximal")
        if self.estimator == "unbiased" and anchor == "behavior" and config.training.updates > 1:
            yield f"unbiased takes the ratio to the proximal policy, and '{loss.target}' knows none; choose k2 or k3"


class EntropyBonusSettings(Settings):
    """Settings of `regularizers.entropy_bonus`."""

    coefficient: float = Field(0.01, description="η: positive keeps the policy exploring, negative makes it decide")


class M2POTransformSettings(BatchTransformSettings):
    """Settings of `minibatch_transforms.m2po`."""

    belongs_in = "minibatch_transforms"

    threshold: float = Field(0.04, gt=0, description="the mean squared log-ratio that the tokens of an update may have")
    among: Literal["trust_region", "all"] = Field(
        "trust_region",
        description="the tokens that are averaged and left out: trust_region takes those that the update would take "
        "further from the policy that sampled, as in the paper; all takes every token, as in AReaL",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy says just before each update; the transform asks for it itself."""
        return (ACTOR,)


class EntropyTargetSettings(Settings):
    """Settings of `minibatch_transforms.entropy_target`."""

    target: float = Field(0.2, gt=0, description="the entropy that the policy is to keep, in nats per token")
    step: float = Field(0.005, gt=0, description="what the coefficient changes by from one update to the next")
    maximum: float = Field(1.0, gt=0, description="the largest coefficient")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The policy; the transform asks for its entropy itself."""
        return (ACTOR,)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """A coefficient is for a regularizer."""
        if not getattr(config.algorithm.settings, "regularizers", ()):
            yield "entropy_target leads a coefficient that nothing reads: add regularizers: [adaptive_entropy]"


class AdaptiveEntropySettings(Settings):
    """`regularizers.adaptive_entropy` has none; its coefficient comes from a minibatch transform."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Something has to lead the coefficient."""
        transforms: list[Selection] = getattr(config.algorithm.settings, "minibatch_transforms", [])
        # What a transform that is named by import does nobody knows.
        if all(one.record is not None and one.target != "grpo/entropy_target" for one in transforms):
            yield "adaptive_entropy reads a coefficient that nothing sets: add minibatch_transforms: [entropy_target]"
