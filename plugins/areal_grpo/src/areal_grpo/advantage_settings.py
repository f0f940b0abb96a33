"""Settings of advantages and auxiliary losses. Imports no torch, as `areal_grpo.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from areal_core.config import Settings, selections
from areal_core.sdk import CRITIC, ForwardPass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.sdk import Role


class GroupNormalizedSettings(Settings):
    """Settings of `advantages.group_normalized`."""

    needs_group: ClassVar[bool] = True
    epsilon: float = Field(
        1e-6, gt=0, description="ε, added to the standard deviation of the group's rewards to avoid division by 0."
    )


class GroupCenteredSettings(Settings):
    """`advantages.group_centered` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class LeaveOneOutSettings(Settings):
    """`advantages.leave_one_out` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class LitePPOAdvantageSettings(Settings):
    """Settings of `advantages.lite_ppo`."""

    needs_group: ClassVar[bool] = True
    epsilon: float = Field(
        1e-6, gt=0, description="ε, added to the standard deviation of the batch's rewards to avoid division by 0."
    )


class MaxRLSettings(Settings):
    """`advantages.max_rl` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class ReinforcePPBaselineSettings(Settings):
    """`advantages.reinforce_pp_baseline` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class GDPOAdvantageSettings(Settings):
    """Settings of `advantages.gdpo`."""

    needs_group: ClassVar[bool] = True
    weights: dict[str, float] = Field(
        default={},
        description="Weights of the named rewards after normalization, by name. A reward that is not listed has "
        "weight 1.",
    )
    epsilon: float = Field(1e-6, gt=0, description="ε, added to standard deviations to avoid division by 0.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """What shapes the sum of the rewards shapes none of them."""
        shaping = ("overlong_penalty", "length_penalty", "reward_bounds", "reward_scaling")
        for _, chosen in selections(config.algorithm):
            if chosen.target.partition("/")[2] in shaping:
                yield f"gdpo compares the named rewards, and '{chosen.target}' changes only their sum: leave it out"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """The weights of the sum are not those of the advantage."""
        weighed = [chosen.target for chosen in config.rewards if getattr(chosen.common, "weight", 1.0) != 1]
        if weighed:
            yield (
                f"the weights of {', '.join(weighed)} count in the sum that is logged and filtered by; gdpo normalizes "
                "each reward and has weights of its own: advantage.weights"
            )


class GAESettings(Settings):
    """Settings of `generalized_advantages.gae`."""

    makes_returns: ClassVar[bool] = True

    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount factor gamma, from 0 to 1: the share of a reward that counts one step earlier.",
    )
    gae_lambda: float = Field(
        0.95,
        ge=0,
        le=1,
        description="λ of GAE (arXiv 1506.02438), from 0 to 1. 1: use only rewards, with more variance. 0: use the "
        "critic's next value, with its errors.",
    )
    level: Literal["token", "turn"] = Field(
        "token", description="What a step is. `token`: one token. `turn`: a whole turn of the policy."
    )
    whiten: bool = Field(
        True, description="Normalize advantages to mean 0 and variance 1 over the tokens of the batch."
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the critic says of each token."""
        return (ForwardPass(CRITIC, "values", "values"),)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """A critic learns only by an auxiliary loss."""
        if not any(chosen.kind == "auxiliary_losses" for _, chosen in selections(config.algorithm)):
            yield "gae asks a critic, and nothing teaches it: choose an auxiliary loss such as value_regression"


class ReinforcePPAdvantageSettings(Settings):
    """Settings of `generalized_advantages.reinforce_pp`."""

    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount factor gamma, from 0 to 1: the share of a reward that counts one token earlier.",
    )


class ValueRegressionSettings(Settings):
    """Settings of `auxiliary_losses.value_regression`."""

    clip: float | None = Field(
        0.2,
        gt=0,
        description="Value clip range: the loss gains nothing from moving a value further than this from the "
        "critic's value before the batch. null: no clipping.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """A critic that learns, and what it said of each token before."""
        return (ForwardPass(CRITIC, "values", "values"),)

    def check(self, config: RunConfig) -> Iterable[str]:
        """The column `returns` comes from the advantage; of one that is named by import nobody knows."""
        advantage = getattr(config.algorithm.settings, "advantage", None)
        if advantage is None or advantage.record is None or getattr(advantage.settings, "makes_returns", False):
            return
        yield f"value_regression learns the column 'returns', which '{advantage.target}' does not make; choose gae"
