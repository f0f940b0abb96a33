"""What this plugin supplies. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl

COMPOSITION = "areal_core.algorithms.composition:PolicyGradient"


def _component(name: str, summary: str, target: str, config: str | None = None) -> Component:
    settings = f"areal_homemade.config:{config}" if config else None
    return Component(
        name, summary, target=target if target == COMPOSITION else f"areal_homemade.{target}", config=settings
    )


@hookimpl
def areal_algorithms() -> list[Component]:
    """Whole ones."""
    return [
        _component("ppo", "a critic, a clipped loss and a KL penalty in the reward", COMPOSITION, "PPOSettings"),
        _component("distill", "on-policy distillation from a teacher", COMPOSITION, "DistillationSettings"),
        _component("dpo", "direct preference optimization on pairs of answers", "preferences:DPO", "DPOSettings"),
    ]


@hookimpl
def areal_advantages() -> list[Component]:
    """From rewards to advantages."""
    return [
        _component("gae", "generalized advantage estimation", "critic:gae", "GAESettings"),
        _component(
            "teacher",
            "log-probability of each token under the teacher minus that under the policy",
            "distillation:closer_to_the_teacher",
            "TeacherSettings",
        ),
    ]


@hookimpl
def areal_policy_losses() -> list[Component]:
    """The loss of a token."""
    return [_component("clipped", "PPO's clipped loss", "critic:clipped")]


@hookimpl
def areal_auxiliary_losses() -> list[Component]:
    """What is learned beside the policy."""
    return [_component("value", "regression of the critic's values", "critic:value_regression", "ValueSettings")]


@hookimpl
def areal_batch_transforms() -> list[Component]:
    """Columns of a batch."""
    return [
        _component("kl_in_reward", "a KL penalty in the reward", "kl_in_reward:kl_in_reward", "KLInRewardSettings"),
    ]
