"""Settings of reward shaping, group filters and batch transforms. Imports no torch, as `areal_grpo.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from areal_core.config import Settings
from areal_core.sdk import ACTOR, REFERENCE, BatchTransformSettings, ForwardPass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.sdk import Role


class ZeroVarianceSettings(Settings):
    """`group_filters.zero_variance` has none; it checks that groups can vary."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """A group of one episode always has equal rewards: every group would be dropped."""
        if config.rollout.group_size == 1:
            yield (
                "zero_variance drops groups whose rewards are all equal, and with rollout.group_size 1 that is every "
                "group; set rollout.group_size to 2 or more, or leave it out"
            )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """An advantage that compares each reward learns from groups that this filter drops."""
        if getattr(getattr(config.algorithm.settings, "advantage", None), "target", None) == "grpo/gdpo":
            yield (
                "zero_variance compares the sum of the rewards, and gdpo each of them: groups whose rewards differ and "
                "cancel out are dropped"
            )


class OverlongPenaltySettings(Settings):
    """Settings of `reward_shaping.overlong_penalty`."""

    max_length: int = Field(
        ge=1, description="Length of an answer, in sampled tokens, from which the full penalty applies."
    )
    buffer: int = Field(
        ge=1, description="Number of tokens below max_length over which the penalty grows linearly from 0."
    )
    factor: float = Field(1.0, gt=0, description="Full penalty, in units of the reward.")

    @model_validator(mode="after")
    def _fits(self) -> OverlongPenaltySettings:
        if self.buffer > self.max_length:
            raise ValueError("buffer must be at most max_length, or an answer without a token would be too long")
        return self

    def notes(self, config: RunConfig) -> Iterable[str]:
        """An answer that is cut before the penalty begins is never punished."""
        longest = config.sampling.max_new_tokens
        if longest <= self.max_length - self.buffer:
            yield (
                f"the penalty begins above {self.max_length - self.buffer} tokens, and one generation has at most "
                f"{longest} (sampling.max_new_tokens): with one turn it is never due"
            )


class LengthPenaltySettings(Settings):
    """Settings of `reward_shaping.length_penalty`."""

    coefficient: float = Field(
        1.0,
        gt=0,
        description="Difference in reward between a correct answer of the group's shortest length and one of its "
        "longest.",
    )
    right_above: float = Field(0.0, description="An answer with a reward above this counts as correct.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """A group of one has nothing to compare its length with."""
        if config.rollout.group_size == 1:
            yield (
                "length_penalty compares the answers to one prompt, and rollout.group_size is 1; set "
                "rollout.group_size to 2 or more, or choose overlong_penalty"
            )


class RewardBoundsSettings(Settings):
    """Settings of `reward_shaping.reward_bounds`."""

    low: float | None = Field(None, description="Lower bound of the reward. null: none.")
    high: float | None = Field(None, description="Upper bound of the reward. null: none.")

    @model_validator(mode="after")
    def _ordered(self) -> RewardBoundsSettings:
        if self.low is None and self.high is None:
            raise ValueError("low or high must be set")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError("low must be below high")
        return self


class KLInRewardSettings(BatchTransformSettings):
    """Settings of `batch_transforms.kl_in_reward`."""

    belongs_in = "batch_transforms"

    coefficient: float = Field(
        0.05,
        gt=0,
        description="KL coefficient β: the penalty for each nat of log(policy / reference). With a target: its "
        "initial value.",
    )
    target: float | None = Field(
        None,
        gt=0,
        description="Target of the KL per episode, in nats, to which the coefficient adapts. null: a fixed "
        "coefficient.",
    )
    horizon: int = Field(
        10_000,
        ge=1,
        description="With a target: number of episodes over which the coefficient adapts. Larger is slower.",
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy at the start of the batch and the reference say of each token."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),
        )


class RewardScalingSettings(BatchTransformSettings):
    """Settings of `batch_transforms.reward_scaling`."""

    belongs_in = "batch_transforms"

    shift: float = Field(0.0, description="Amount added to the reward before it is scaled.")
    scale: float = Field(1.0, gt=0, description="Factor that the shifted reward is multiplied by.")
    clip: float | None = Field(
        None,
        gt=0,
        description="Maximum absolute value of the scaled reward; larger ones are clipped. null: no clipping.",
    )
