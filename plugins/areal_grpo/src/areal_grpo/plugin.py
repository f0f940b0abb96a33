"""What this plugin supplies: the GRPO family and fine-tuning, whole and in parts. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl

_POLICY_GRADIENT = "areal_core.algorithms.composition:PolicyGradient"


@hookimpl
def areal_algorithms() -> list[Component]:
    """Compositions with the defaults of their papers."""
    return [
        Component(
            "grpo",
            "rewards normalised within a prompt's answers, ratios clipped",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:GRPOSettings",
        ),
        Component(
            "dr_grpo",
            "GRPO without its two biases: no standard deviation, a constant length",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:DrGRPOSettings",
        ),
        Component(
            "rloo",
            "REINFORCE with the other answers' mean reward as the baseline",
            target=_POLICY_GRADIENT,
            config="areal_grpo.config:RLOOSettings",
        ),
        Component(
            "sft",
            "supervised fine-tuning on a data set's completions",
            target="areal_core.algorithms.supervised:Supervised",
            config="areal_core.algorithms.settings:SupervisedSettings",
        ),
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """From the rewards of a batch to the advantage of each sequence."""
    return [
        Component(
            "group_normalised",
            "less the group's mean, over its standard deviation (GRPO)",
            target="areal_grpo.advantages:group_normalised",
            config="areal_grpo.config:GroupNormalisedSettings",
        ),
        Component(
            "group_centred",
            "less the group's mean (Dr. GRPO)",
            target="areal_grpo.advantages:group_centred",
            config="areal_grpo.config:GroupCentredSettings",
        ),
        Component(
            "leave_one_out",
            "less the mean of the group's other episodes (RLOO)",
            target="areal_grpo.advantages:leave_one_out",
            config="areal_grpo.config:LeaveOneOutSettings",
        ),
    ]


@hookimpl
def areal_policy_losses() -> list[Component]:
    """The loss of a token."""
    return [
        Component(
            "ppo_clip",
            "the clipped ratio of PPO, bounds of its own for each side, optionally dual",
            target="areal_grpo.losses:ppo_clip",
            config="areal_grpo.config:PPOClipSettings",
        ),
        Component(
            "reinforce",
            "the plain policy gradient, for one update a batch",
            target="areal_grpo.losses:reinforce",
        ),
    ]


@hookimpl
def areal_corrections() -> list[Component]:
    """Weights for tokens that another policy has sampled."""
    return [
        Component(
            "token_truncate",
            "each token's importance weight, capped",
            target="areal_grpo.corrections:token_truncate",
            config="areal_grpo.config:TokenTruncateSettings",
        ),
        Component(
            "token_mask",
            "each token's importance weight, and no token whose weight is out of bounds",
            target="areal_grpo.corrections:token_mask",
            config="areal_grpo.config:TokenMaskSettings",
        ),
    ]


@hookimpl
def areal_filters() -> list[Component]:
    """Which finished groups are trained on."""
    return [
        Component(
            "zero_variance",
            "drops groups whose rewards are all equal: nothing can be learnt from them",
            target="areal_grpo.filters:zero_variance",
            config="areal_grpo.config:ZeroVarianceSettings",
        )
    ]
