"""Settings of the algorithms. This module does not import torch, so that a config can be checked anywhere.

An algorithm here consists only of defaults; `areal_core.algorithms.composition.PolicyGradient` does the work. In the
formulas π is the current policy, π_prox the policy at the start of the batch, and μ the policy that sampled. i counts
the G episodes of a prompt, t the tokens. r_t = π / π_prox and w_t = min(π_prox / μ, cap), both of token t. N is the
number of tokens of an update, B that of its sequences, T_i that of the tokens of sequence i.

No paper has w_t, which corrects for asynchronous sampling. `corrections: []` removes it.
"""

from __future__ import annotations

from areal_core.config import Selection, component
from areal_core.sdk import PolicyGradientSettings

_ADVANTAGE = "Estimator that turns rewards into advantages."
_POLICY_LOSS = "Loss of each token."
_AGGREGATION = "How the losses of tokens are added up."
_CORRECTIONS = (
    "Off-policy corrections for the distance between the policy that sampled and the proximal "
    "policy. Their weights are multiplied."
)


class GRPOSettings(PolicyGradientSettings):
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

    A_i = (R_i - mean_j R_j) / (std_j R_j + ε), one for all tokens of an episode;
    L = -1/N Σ_{i,t} w_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i), over the N tokens of an update.

    Three defaults differ from the paper. All tokens have the same weight; `loss_aggregation: core/sequence_mean` is the
    paper's mean over each sequence. There is no penalty towards a reference model; the paper's is `regularizers:
    [{type: reference_kl, coefficient: 0.04, estimator: k3}]`. w_t corrects for asynchronous sampling, which the paper
    does not have.
    """

    advantage: Selection = component("advantages", default="grpo/group_normalized", description=_ADVANTAGE)
    corrections: list[Selection] = component("corrections", default=["grpo/token_truncate"], description=_CORRECTIONS)
    policy_loss: Selection = component("policy_losses", default="grpo/ppo_clip", description=_POLICY_LOSS)


class DrGRPOSettings(GRPOSettings):
    """GRPO done right ("Understanding R1-Zero-like training", arXiv 2503.20783).

    A_i = R_i - mean_j R_j;  L = -1/(B L) Σ_{i,t} w_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i), over the B
    sequences of an update, with a constant L, usually `sampling.max_new_tokens`. L, `loss_aggregation.length`, has no
    default, because it scales the loss.
    """

    advantage: Selection = component("advantages", default="grpo/group_centered", description=_ADVANTAGE)
    loss_aggregation: Selection = component(
        "loss_aggregations", default="core/constant_length", description=_AGGREGATION
    )


class DAPOSettings(GRPOSettings):
    """Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476).

    A_i as in GRPO, for groups whose rewards are not all equal;
    L = -1/N Σ_{i,t} w_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.28) A_i).

    The fourth part of the paper, the penalty for overlong answers, needs the maximum length, which has no default:
    `reward_shaping: [{type: overlong_penalty, max_length: ..., buffer: ...}]`. The preset `grpo/dapo` has it. The paper
    makes 16 updates per batch; with one update nothing is clipped.
    """

    group_filters: list[Selection] = component(
        "group_filters",
        default=["grpo/zero_variance"],
        description="Filters that drop finished groups or take answers out of the loss, in this order.",
    )
    policy_loss: Selection = component(
        "policy_losses", default={"type": "grpo/ppo_clip", "clip_high": 0.28}, description=_POLICY_LOSS
    )


class GSPOSettings(GRPOSettings):
    """Group sequence policy optimization (arXiv 2507.18071).

    A_i as in GRPO; s_i = exp(1/T_i Σ_t log r_t);
    L = -1/B Σ_i 1/T_i Σ_t w_t min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i), with the gradient of s_i.

    The paper makes 4 updates per batch; with one update nothing is clipped.
    """

    policy_loss: Selection = component("policy_losses", default="grpo/gspo", description=_POLICY_LOSS)
    loss_aggregation: Selection = component("loss_aggregations", default="core/sequence_mean", description=_AGGREGATION)


class GMPOSettings(GRPOSettings):
    """Geometric-mean policy optimization (arXiv 2507.20673).

    A_i as in GRPO; L = -1/B Σ_i A_i (Π_t r̃_t)^(1/T_i), with log r̃_t = min(log r_t, 0.4) where A_i > 0, else
    max(log r_t, -0.4). Each token of the sequence is weighted by w_t.

    A single token that has moved far changes a geometric mean little, so the bounds are wider than GRPO's. With one
    update per batch nothing is clipped.
    """

    policy_loss: Selection = component("policy_losses", default="grpo/gmpo", description=_POLICY_LOSS)
    loss_aggregation: Selection = component("loss_aggregations", default="core/sequence_mean", description=_AGGREGATION)


class CISPOSettings(GRPOSettings):
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585).

    A_i as in GRPO; L = -1/N Σ_{i,t} w_t c_t A_i log π, c_t = min(r_t, 1 + 4) without a gradient.

    The paper has no lower bound, and does not state the upper one; 4 is a common choice. It also drops groups whose
    rewards are all equal (`group_filters: [zero_variance]`).
    """

    policy_loss: Selection = component("policy_losses", default="grpo/cispo", description=_POLICY_LOSS)


class SAPOSettings(GRPOSettings):
    """Soft adaptive policy optimization (arXiv 2511.20347).

    A_i as in GRPO; L = -1/B Σ_i 1/T_i Σ_t w_t 4/τ σ(τ (r_t - 1)) A_i, with τ = 1 where A_i > 0, else 1.05.
    """

    policy_loss: Selection = component("policy_losses", default="grpo/sapo", description=_POLICY_LOSS)
    loss_aggregation: Selection = component("loss_aggregations", default="core/sequence_mean", description=_AGGREGATION)


class RLOOSettings(GRPOSettings):
    """REINFORCE leave-one-out ("Back to basics", arXiv 2402.14740).

    A_i = R_i - mean_{j≠i} R_j;  L = -1/B Σ_i A_i Σ_t w_t log π(y_t), over the B sequences of an update.

    The sum over tokens (`constant_length` of 1) is the log-probability of the whole answer, as in the paper. There is
    no clipping, so it is meant for one update per batch; for several choose `policy_loss: grpo/ppo_clip`. The
    gradient's norm grows with the length of answers: raise `train_engine.max_gradient_norm`, or every update is clipped
    to it. The paper's KL penalty is `batch_transforms: [kl_in_reward]`.
    """

    advantage: Selection = component("advantages", default="grpo/leave_one_out", description=_ADVANTAGE)
    policy_loss: Selection = component("policy_losses", default="grpo/reinforce", description=_POLICY_LOSS)
    loss_aggregation: Selection = component(
        "loss_aggregations", default={"type": "core/constant_length", "length": 1}, description=_AGGREGATION
    )


class ReinforcePPSettings(GRPOSettings):
    """REINFORCE++ (arXiv 2501.03262).

    A_t = sum of the rewards from token t on, minus their mean and divided by their standard deviation over all tokens
    of the batch; L as in GRPO. Groups may consist of one episode.

    The paper has a KL to a reference model in the reward: `batch_transforms: [kl_in_reward]`.
    """

    advantage: Selection = component("advantages", default="grpo/reinforce_pp", description=_ADVANTAGE)


class LitePPOSettings(GRPOSettings):
    """Lite PPO ("Part I: Tricks or traps?", arXiv 2508.08221).

    A_i = (R_i - mean_j R_j) / std R, with the mean of the group and the standard deviation of the batch; L as in GRPO.
    """

    advantage: Selection = component("advantages", default="grpo/lite_ppo", description=_ADVANTAGE)


class M2POSettings(GRPOSettings):
    """Second-moment trust policy optimization ("Prosperity before collapse", arXiv 2510.01161).

    A_i as in GRPO; L = -1/N Σ_{i,t} m_t (π / μ) A_i, not clipped. Tokens with A_i > 0 and π > μ, or A_i < 0 and π < μ,
    may be masked (m_t = 0): those with the largest (log π - log μ)², until the mean of the others is at most 0.04.

    It is made for data that is many versions old. One forward pass before each update computes the mask. No proximal
    policy is computed, and no further correction may weight the tokens.
    """

    corrections: list[Selection] = component("corrections", default=[], description=_CORRECTIONS)
    minibatch_transforms: list[Selection] = component(
        "batch_transforms",
        default=["grpo/m2po"],
        description="Functions that compute fields of a minibatch just before its update, in this order.",
    )
    policy_loss: Selection = component(
        "policy_losses",
        default={"type": "grpo/rollout_importance", "clip_low": None, "clip_high": None},
        description=_POLICY_LOSS,
    )


class DPPOSettings(GRPOSettings):
    """Divergence proximal policy optimization (arXiv 2602.04879).

    A_i as in GRPO; L = -1/N Σ_{i,t} m_t min(π / μ, 20) A_i log π, with the ratio as a constant. m_t is 0 where
    |π - μ| > 0.2 and the gradient would increase it.

    `policy_loss.divergence: kl` bounds a KL divergence instead of a difference and needs other thresholds. No proximal
    policy is computed, and no correction may weight the tokens.
    """

    corrections: list[Selection] = component("corrections", default=[], description=_CORRECTIONS)
    policy_loss: Selection = component("policy_losses", default="grpo/dppo", description=_POLICY_LOSS)


class PPOSettings(GRPOSettings):
    """Proximal policy optimization with a critic (arXiv 1707.06347; GAE: arXiv 1506.02438).

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = reward + γ V_{t+1} - V_t, with γ = 1 and λ = 0.95, whitened over the batch;
    L as in GRPO; the critic learns A_t + V_t (A_t before whitening), clipped around its values before the batch.

    An untrained critic misleads the policy: with `warmup_steps` only the critic learns on the first batches. Groups may
    consist of one episode. A penalty towards a reference model in the reward is `batch_transforms: [kl_in_reward]`.
    """

    advantage: Selection = component("advantages", default="grpo/gae", description=_ADVANTAGE)
    auxiliary_losses: list[Selection] = component(
        "auxiliary_losses",
        default=["grpo/value_regression"],
        description="Losses that are trained in the same update as the policy, such as a critic's.",
    )
