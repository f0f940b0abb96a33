"""What can be set, and which models each part needs. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_core.config import Selection, Settings, component
from areal_core.sdk import ACTOR, CRITIC, REFERENCE, ForwardPass, PolicyGradientSettings, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

TEACHER = Role("teacher", needs_path=True)


class GAESettings(Settings):
    """Settings of `critic.gae`."""

    discount: float = Field(
        1.0, gt=0, le=1, description="Discount factor from 0 to 1: the share of a reward that counts one token earlier."
    )
    smoothing: float = Field(
        0.95, ge=0, le=1, description="Lambda of GAE, from 0 to 1. 0: trust the critic. 1: trust the rewards."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the critic expects before each token."""
        return (ForwardPass(CRITIC, "values", "values"),)


class ValueSettings(Settings):
    """Settings of `critic.value_regression`: none, but a critic that learns."""

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The critic."""
        return (CRITIC,)


class KLInRewardSettings(Settings):
    """Settings of `kl_in_reward.kl_in_reward`."""

    coefficient: float = Field(
        0.05, ge=0, description="KL coefficient: the penalty for each nat of log(policy / reference)."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy and its reference say of each token."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),
        )


class TeacherSettings(Settings):
    """Settings of `distillation.closer_to_the_teacher`."""

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy and its teacher say of each token."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(TEACHER, "logprobs", "teacher_logprobs"),
        )


class PPOSettings(PolicyGradientSettings):
    """PPO: a critic, and a price on the distance from the reference."""

    batch_transforms: list[Selection] = component(
        "batch_transforms",
        default=["homemade/kl_in_reward"],
        description="Functions that compute fields of a whole batch before its advantages, in this order.",
    )
    advantage: Selection = component(
        "advantages", default="homemade/gae", description="Estimator that turns rewards into advantages."
    )
    policy_loss: Selection = component("policy_losses", default="homemade/clipped", description="Loss of each token.")
    auxiliary_losses: list[Selection] = component(
        "auxiliary_losses",
        default=["homemade/value"],
        description="Losses that are trained in the same update as the policy, such as a critic's.",
    )


class DistillationSettings(PolicyGradientSettings):
    """The policy writes, and learns where a teacher would rather have written something else."""

    advantage: Selection = component(
        "advantages",
        default="homemade/teacher",
        description="Estimator that turns the teacher's log-probabilities into advantages.",
    )
    policy_loss: Selection = component("policy_losses", default="homemade/clipped", description="Loss of each token.")


class DPOSettings(Settings):
    """Settings of `preferences.DPO`."""

    beta: float = Field(
        0.1, gt=0, description="Beta of DPO: the larger it is, the closer the policy stays to the reference."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The policy, and what the reference says of each token."""
        return (ACTOR, ForwardPass(REFERENCE, "logprobs", "reference_logprobs"))
