"""Components for advantages, shaping, filters, batch transforms and auxiliary losses. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component


def _part(module: str, name: str, summary: str, settings: str | None) -> Component:
    """Return the component of a function of the same name in a module of this package, with its settings."""
    config = f"areal_grpo.{settings}" if settings else "areal_core.config:NoSettings"
    return Component(name, summary, target=f"areal_grpo.{module}:{name}", config=config)


def _advantage(name: str, summary: str, settings: str, module: str = "advantages") -> Component:
    return _part(module, name, summary, f"advantage_settings:{settings}")


ADVANTAGES = [
    _advantage(
        "group_normalized",
        "reward minus the group's mean, divided by the group's standard deviation (GRPO)",
        "GroupNormalizedSettings",
    ),
    _advantage("group_centered", "reward minus the group's mean (Dr. GRPO)", "GroupCenteredSettings"),
    _advantage("leave_one_out", "reward minus the mean of the group's other episodes (RLOO)", "LeaveOneOutSettings"),
    _advantage(
        "lite_ppo",
        "reward minus the group's mean, divided by the batch's standard deviation (Lite PPO)",
        "LitePPOAdvantageSettings",
    ),
    _advantage("max_rl", "reward minus the group's mean, divided by that mean (MaxRL)", "MaxRLSettings"),
    _advantage("pass_at_k", "what an answer adds to the best of k answers (pass@k, max@k)", "PassAtKSettings"),
    _advantage(
        "reinforce_pp_baseline",
        "reward minus the group's mean, whitened over the tokens of the batch (REINFORCE++)",
        "ReinforcePPBaselineSettings",
    ),
    _advantage(
        "gdpo",
        "each named reward normalized in its group, their weighted sum normalized in the batch (GDPO)",
        "GDPOAdvantageSettings",
    ),
    _advantage(
        "gigpo",
        "the group's comparison of episodes, and of their turns that began in the same state (GiGPO)",
        "GiGPOSettings",
        "anchor_states",
    ),
    _advantage(
        "reinforce_pp",
        "discounted sum of the rewards from each token on, whitened over the batch (REINFORCE++)",
        "ReinforcePPAdvantageSettings",
        "generalized_advantages",
    ),
    _advantage(
        "gae",
        "generalized advantage estimation by token or turn, with a critic (PPO)",
        "GAESettings",
        "generalized_advantages",
    ),
    _advantage(
        "optimal_token_baseline",
        "rewards from each token on, minus their mean weighted by the variance of each answer's gradient (OTB)",
        "OptimalTokenBaselineSettings",
        "generalized_advantages",
    ),
]

REWARD_SHAPING = [
    _part(
        "reward_shaping",
        "overlong_penalty",
        "lowers the reward of answers close to the maximum length (DAPO)",
        "transform_settings:OverlongPenaltySettings",
    ),
    _part(
        "reward_shaping",
        "length_penalty",
        "raises the reward of the shorter answers to a prompt and lowers that of the longer ones (Kimi k1.5)",
        "transform_settings:LengthPenaltySettings",
    ),
    _part(
        "reward_shaping",
        "reward_bounds",
        "bounds the reward from below and above",
        "transform_settings:RewardBoundsSettings",
    ),
]

GROUP_FILTERS = [
    _part(
        "group_filters",
        "zero_variance",
        "drops groups whose rewards are all equal, because all their advantages are 0 (DAPO)",
        "transform_settings:ZeroVarianceSettings",
    ),
    _part("group_filters", "mask_truncated", "takes truncated answers out of the loss (DAPO)", None),
]

BATCH_TRANSFORMS = [
    _part(
        "batch_transforms",
        "kl_in_reward",
        "adds a KL penalty towards a reference model to the reward of each token, fixed or adaptive",
        "transform_settings:KLInRewardSettings",
    ),
    _part(
        "batch_transforms",
        "reward_scaling",
        "shifts, scales and clips the reward",
        "transform_settings:RewardScalingSettings",
    ),
]

AUXILIARY_LOSSES = [
    _part(
        "auxiliary_losses",
        "value_regression",
        "trains the critic on the returns, with values clipped around their old ones (PPO)",
        "advantage_settings:ValueRegressionSettings",
    )
]
