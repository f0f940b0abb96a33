"""Settings of the algorithms and of their parts. Imports no torch, so that a config is checked anywhere.

An algorithm here is nothing but its defaults: `areal_core.algorithms.composition.PolicyGradient` does the work. In the
formulas π is the policy that learns, π_prox the policy at the start of the batch, μ the policy that sampled; i counts
the G episodes of a prompt, t the tokens; r_t = π / π_prox and w_t = min(π_prox / μ, cap), both of token t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from areal_core.algorithms.settings import CorrectionSettings, PolicyGradientSettings, PolicyLossSettings
from areal_core.config import Selection, Settings, component
from areal_core.interfaces import REFERENCE, Pass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.interfaces import Role


class GRPOSettings(PolicyGradientSettings):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

    A_i = (R_i - mean_j R_j) / (std_j R_j + ε), one for all tokens of an episode;
    L = -1/N Σ_{i,t} w_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i), over the N tokens of an update.

    Three defaults are not the paper's, and each is a setting: tokens count the same (the paper's mean over each
    sequence is `aggregation: core/sequence_mean`), there is no penalty towards a reference model (the paper's is
    `regularisers: [reference_kl]`, of coefficient 0.04), and w_t corrects for asynchronous sampling, which the paper
    does not have.
    """

    advantage: Selection = component(
        "advantages", default="grpo/group_normalised", description="turns rewards into advantages"
    )
    corrections: list[Selection] = component(
        "corrections",
        default=["grpo/token_truncate"],
        description="correct for the distance between the sampling policy and the learning one; their weights multiply",
    )
    policy_loss: Selection = component("policy_losses", default="grpo/ppo_clip", description="the loss of a token")


class DrGRPOSettings(GRPOSettings):
    """GRPO done right ("Understanding R1-Zero-like training", arXiv 2503.20783).

    A_i = R_i - mean_j R_j;  L = -1/(B L) Σ_{i,t} w_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i), over the B
    sequences of an update, with a constant L, usually `sampling.max_new_tokens`. L has no default: it scales the
    loss, so it has to be said: `aggregation.length`.
    """

    advantage: Selection = component(
        "advantages", default="grpo/group_centred", description="turns rewards into advantages"
    )
    aggregation: Selection = component(
        "aggregations", default="core/constant_length", description="how the tokens' losses are added up"
    )


class RLOOSettings(GRPOSettings):
    """REINFORCE leave-one-out ("Back to basics", arXiv 2402.14740).

    A_i = R_i - mean_{j≠i} R_j;  L = -1/B Σ_i A_i Σ_t w_t log π(y_t), over the B sequences of an update.

    The sum over tokens (`constant_length` of 1) is the log-probability of the whole answer, as in the paper. There is
    no clipping, so it is meant for one update a batch; for several choose `policy_loss: grpo/ppo_clip`.
    """

    advantage: Selection = component(
        "advantages", default="grpo/leave_one_out", description="turns rewards into advantages"
    )
    policy_loss: Selection = component("policy_losses", default="grpo/reinforce", description="the loss of a token")
    aggregation: Selection = component(
        "aggregations",
        default={"type": "core/constant_length", "length": 1},
        description="how the tokens' losses are added up",
    )


class PPOClipSettings(PolicyLossSettings):
    """Settings of `losses.ppo_clip`."""

    clip_low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - clip_low gain nothing more")
    clip_high: float = Field(0.2, ge=0, description="ratios above 1 + clip_high gain nothing more; DAPO has 0.28")
    dual_clip: float | None = Field(
        None, gt=1, description="bounds the loss of a negative advantage by this factor, usually 3; null does not"
    )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """With one update on a batch the policy is the proximal one: the ratio is 1, and nothing is ever clipped."""
        written = sorted(self.model_fields_set)
        if written and config.training.updates_per_batch * config.training.epochs_per_batch == 1:
            yield (
                f"{' and '.join(written)} without effect: with one update on a batch every ratio is 1, so nothing is "
                "clipped; see training.updates_per_batch and training.epochs_per_batch"
            )


class TokenTruncateSettings(CorrectionSettings):
    """Settings of `corrections.token_truncate`."""

    cap: float = Field(2.0, gt=0, description="the greatest weight of a token")


class TokenMaskSettings(CorrectionSettings):
    """Settings of `corrections.token_mask`."""

    low: float = Field(0.5, ge=0, description="tokens with a smaller weight are not learnt from")
    high: float = Field(5.0, gt=0, description="tokens with a greater weight are not learnt from")

    @model_validator(mode="after")
    def _ordered(self) -> TokenMaskSettings:
        if not self.low <= 1 <= self.high:
            raise ValueError("low must be at most 1 and high at least 1: 1 is the weight of a token sampled on policy")
        return self


class ReferenceKLSettings(Settings):
    """Settings of `regularisers.reference_kl`."""

    coefficient: float = Field(0.04, gt=0, description="β; 0.04 is GRPO's")
    estimator: Literal["k2", "k3", "unbiased"] = Field(
        "k3",
        description="with d = log policy - log reference: k2 is d²/2, its gradient that of KL(policy ‖ reference); "
        "k3 is exp(-d) - 1 + d, its gradient that of KL(reference ‖ policy); unbiased is k3 times the ratio to the "
        "proximal policy, its gradient that of KL(policy ‖ reference)",
    )

    @field_validator("estimator", mode="before")
    @classmethod
    def _has_a_gradient(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 (d itself) has a gradient of 0 in expectation, so in a loss it pulls nowhere and only adds noise; "
                "choose k2 or unbiased for the gradient of KL(policy ‖ reference), k3 for that of "
                "KL(reference ‖ policy), or put k1 into the reward: stages: [kl_in_reward]"
            )
        return value

    def needs(self, updates: int) -> Iterable[Role | Pass]:
        """What the reference says of each token."""
        return (Pass(REFERENCE, "logprobs", "reference_logprobs"),)


class EntropyBonusSettings(Settings):
    """Settings of `regularisers.entropy_bonus`."""

    coefficient: float = Field(0.01, description="η: positive keeps the policy exploring, negative makes it decide")
