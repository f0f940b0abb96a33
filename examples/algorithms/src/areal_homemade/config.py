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

    discount: float = Field(1.0, gt=0, le=1, description="of a reward that is one token away")
    smoothing: float = Field(0.95, ge=0, le=1, description="lambda: 0 trusts the critic, 1 the rewards")

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

    coefficient: float = Field(0.05, ge=0, description="what a nat of distance from the reference costs")

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
        "batch_transforms", default=["homemade/kl_in_reward"], description="price of the distance"
    )
    advantage: Selection = component("advantages", default="homemade/gae", description="rewards less expectations")
    policy_loss: Selection = component("policy_losses", default="homemade/clipped", description="the loss of a token")
    auxiliary_losses: list[Selection] = component(
        "auxiliary_losses", default=["homemade/value"], description="the critic's part"
    )


class DistillationSettings(PolicyGradientSettings):
    """The policy writes, and learns where a teacher would rather have written something else."""

    advantage: Selection = component("advantages", default="homemade/teacher", description="what the teacher prefers")
    policy_loss: Selection = component("policy_losses", default="homemade/clipped", description="the loss of a token")


class DPOSettings(Settings):
    """Settings of `preferences.DPO`."""

    beta: float = Field(0.1, gt=0, description="how much the policy may leave the reference")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The policy, and what the reference says of each token."""
        return (ACTOR, ForwardPass(REFERENCE, "logprobs", "reference_logprobs"))
