"""Settings models. areal reads them without importing torch."""

from __future__ import annotations

from typing import ClassVar

from areal_core.config import Selection, Settings, component
from areal_core.sdk import CRITIC, PolicyGradientSettings, Role
from pydantic import Field


class BetterOrWorseSettings(Settings):
    """Settings of `advantages.better_or_worse`."""

    needs_group: ClassVar[bool] = True
    margin: float = Field(
        1e-4, ge=0, description="Rewards that differ from the mean by at most this count as equal to it."
    )


class RewardRegressionSettings(Settings):
    """Settings of `auxiliary_losses.reward_regression`: none, but it needs a critic."""

    def needs(self, updates: int) -> tuple[Role, ...]:
        """Return the models and forward passes that the loss needs for a batch of so many updates."""
        del updates
        return (CRITIC,)


class BetterSettings(PolicyGradientSettings):
    """The algorithm of this plugin: two defaults, everything else as the core composes it."""

    advantage: Selection = component(
        "advantages",
        default="example/better_or_worse",
        description="Estimator that turns rewards into advantages.",
    )
    policy_loss: Selection = component(
        "policy_losses",
        default="example/capped_reinforce",
        description="Loss of each token.",
    )
