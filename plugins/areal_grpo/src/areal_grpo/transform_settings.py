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

    max_length: int = Field(ge=1, description="sampled tokens from which the whole penalty is due")
    buffer: int = Field(ge=1, description="tokens below max_length over which the penalty grows from 0")
    factor: float = Field(1.0, gt=0, description="the largest penalty, in the unit of the reward")

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

    coefficient: float = Field(1.0, gt=0, description="what the shortest right answer earns more than the longest")
    right_above: float = Field(0.0, description="an answer with a greater reward counts as right")

    def check(self, config: RunConfig) -> Iterable[str]:
        """A group of one has nothing to compare its length with."""
        if config.rollout.group_size == 1:
            yield (
                "length_penalty compares the answers to one prompt, and rollout.group_size is 1; set "
                "rollout.group_size to 2 or more, or choose overlong_penalty"
            )


class RewardBoundsSettings(Settings):
    """Settings of `reward_shaping.reward_bounds`."""

    low: float | None = Field(None, description="smaller rewards are raised to this; null bounds nothing")
    high: float | None = Field(None, description="greater rewards are lowered to this; null bounds nothing")

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

    coefficient: float = Field(0.05, gt=0, description="what a nat costs; with a target, at the beginning")
    target: float | None = Field(
        None, gt=0, description="the KL of an episode in nats that the coefficient is led towards; null keeps it fixed"
    )
    horizon: int = Field(10_000, ge=1, description="with a target: episodes over which the coefficient follows")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy at the start of the batch and the reference say of each token."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),
        )


class RewardScalingSettings(BatchTransformSettings):
    """Settings of `batch_transforms.reward_scaling`."""

    belongs_in = "batch_transforms"

    shift: float = Field(0.0, description="added to the reward first")
    scale: float = Field(1.0, gt=0, description="multiplied then")
    clip: float | None = Field(None, gt=0, description="the largest amount that is left; null leaves all")
