"""Settings of the algorithms. Imports no torch, so that a config is checked anywhere.

An algorithm here is nothing but its defaults: `areal_core.algorithms.composition.PolicyGradient` does the work. In the
formulas π is the policy that learns, π_prox the policy at the start of the batch, μ the policy that sampled; i counts
the G episodes of a prompt, t the tokens; r_t = π / π_prox and w_t = min(π_prox / μ, cap), both of token t.
"""

from __future__ import annotations

from areal_core.algorithms.settings import PolicyGradientSettings
from areal_core.config import Selection, component


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
