"""Settings of advantages and auxiliary losses. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from areal_core.config import Settings, selections
from areal_core.sdk import ACTOR, CRITIC, ForwardPass

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
    """Settings of `advantages.group_centered`, which has none. It needs a group."""

    needs_group: ClassVar[bool] = True


class LeaveOneOutSettings(Settings):
    """Settings of `advantages.leave_one_out`, which has none. It needs a group."""

    needs_group: ClassVar[bool] = True


class LitePPOAdvantageSettings(Settings):
    """Settings of `advantages.lite_ppo`."""

    needs_group: ClassVar[bool] = True
    epsilon: float = Field(
        1e-6, gt=0, description="ε, added to the standard deviation of the batch's rewards to avoid division by 0."
    )


class MaxRLSettings(Settings):
    """Settings of `advantages.max_rl`, which has none. It needs a group."""

    needs_group: ClassVar[bool] = True


class PassAtKSettings(Settings):
    """Settings of `advantages.pass_at_k`."""

    needs_group: ClassVar[bool] = True
    k: int | None = Field(
        None,
        ge=2,
        description="Number of answers of which only the best counts, at most rollout.group_size. null: all answers of "
        "the group, so that with rewards of 0 and 1 only groups with exactly one right answer teach anything. Half of "
        "the group size keeps more groups.",
    )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that only the best answer of a group learns if k is the size of the group."""
        if self.k is None or self.k == config.rollout.group_size:
            yield (
                "pass_at_k over the whole group: with rewards of 0 and 1, groups with two right answers have no "
                f"advantage; choose a smaller advantage.k, such as {max(2, config.rollout.group_size // 2)}"
            )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that a group has at least k answers."""
        if self.k is not None and self.k > config.rollout.group_size:
            yield (
                f"pass_at_k compares {self.k} answers to a prompt, and rollout.group_size is "
                f"{config.rollout.group_size}: set rollout.group_size to {self.k} or more, or lower advantage.k"
            )


class GiGPOSettings(Settings):
    """Settings of `anchor_states.gigpo`."""

    needs_group: ClassVar[bool] = True
    step_weight: float = Field(
        1.0, gt=0, description="Weight ω of the comparison of turns, beside that of whole episodes."
    )
    gamma: float = Field(
        0.95,
        ge=0,
        le=1,
        description="Discount factor gamma, from 0 to 1: the share of a reward that counts one turn earlier. With 1 "
        "and a reward at the end, all turns of an episode have the same return.",
    )
    normalization: Literal["std", "none"] = Field(
        "std", description="Whether both advantages are divided by the standard deviation of what they compare."
    )
    epsilon: float = Field(1e-6, gt=0, description="ε, added to standard deviations to avoid division by 0.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse a single turn, where both comparisons are the same."""
        if config.workflow is not None and config.workflow.target == "core/single_turn":
            yield (
                "gigpo compares the turns of episodes, but the workflow single_turn has one, in which it is "
                "group_normalized times 1 + step_weight: choose advantage: group_normalized, or a workflow of several "
                "turns"
            )


class ReinforcePPBaselineSettings(Settings):
    """Settings of `advantages.reinforce_pp_baseline`, which has none. It needs a group."""

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
        """Refuse components that change only the sum of the rewards: gdpo compares the named rewards."""
        shaping = ("overlong_penalty", "length_penalty", "reward_bounds", "reward_scaling")
        for _, chosen in selections(config.algorithm):
            if chosen.target.partition("/")[2] in shaping:
                yield f"gdpo compares the named rewards, but '{chosen.target}' changes only their sum: remove it"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that weights of rewards do not affect this advantage."""
        weighted = [chosen.target for chosen in config.rewards if getattr(chosen.common, "weight", 1.0) != 1]
        if weighted:
            yield (
                f"the weights of {', '.join(weighted)} affect only the logged reward and filters: gdpo normalizes "
                "each reward and uses advantage.weights"
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
        """Return the forward pass that computes the critic's values."""
        return (ForwardPass(CRITIC, "values", "values"),)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that the critic is not trained without an auxiliary loss."""
        if not any(chosen.kind == "auxiliary_losses" for _, chosen in selections(config.algorithm)):
            yield "gae uses a critic, but nothing trains it: choose an auxiliary loss such as value_regression"


class ReinforcePPAdvantageSettings(Settings):
    """Settings of `generalized_advantages.reinforce_pp`."""

    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount factor gamma, from 0 to 1: the share of a reward that counts one token earlier.",
    )


class OptimalTokenBaselineSettings(Settings):
    """Settings of `generalized_advantages.optimal_token_baseline`."""

    needs_group: ClassVar[bool] = True
    tail: Literal["zero", "return"] = Field(
        "zero",
        description="Advantage of the tokens of an answer beyond the length of the group's second longest one, which "
        "has no other answer to compare with. `zero`: 0. `return`: the rewards from there on, without a baseline.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward passes that compute the policy's probabilities at the start of the batch."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(ACTOR, "sum_pi_squared", "sum_pi_squared"),
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
        """Return the forward pass that computes the critic's values before the batch."""
        return (ForwardPass(CRITIC, "values", "values"),)

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the advantage computes `returns`. An advantage that is named by import is not checked."""
        advantage = getattr(config.algorithm.settings, "advantage", None)
        if advantage is None or advantage.record is None or getattr(advantage.settings, "makes_returns", False):
            return
        yield f"value_regression needs the column 'returns', which '{advantage.target}' does not compute; choose gae"
