"""Settings of reward shaping, group filters and batch transforms. This module does not import torch."""

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
    """Settings of `group_filters.zero_variance`, which has none. It needs groups of several episodes."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse groups of one episode: their rewards are always equal, so every group would be dropped."""
        if config.rollout.group_size == 1:
            yield (
                "zero_variance drops groups whose rewards are all equal. With rollout.group_size 1 these are all "
                "groups; set rollout.group_size to 2 or more, or remove it"
            )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that gdpo could learn from some of the groups that this filter drops."""
        if getattr(getattr(config.algorithm.settings, "advantage", None), "target", None) == "grpo/gdpo":
            yield (
                "zero_variance compares the sum of the rewards, but gdpo each of them: groups whose rewards differ but "
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
    def _check_buffer(self) -> OverlongPenaltySettings:
        if self.buffer > self.max_length:
            raise ValueError("buffer must be at most max_length, or even an empty answer would be penalized")
        return self

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that the penalty has no effect if answers are cut before it begins."""
        longest = config.sampling.max_new_tokens
        if longest <= self.max_length - self.buffer:
            yield (
                f"the penalty begins above {self.max_length - self.buffer} tokens, but one generation has at most "
                f"{longest} (sampling.max_new_tokens): with one turn it never applies"
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
        """Refuse groups of one episode, which have no other answers to compare lengths with."""
        if config.rollout.group_size == 1:
            yield (
                "length_penalty compares the answers to one prompt, but rollout.group_size is 1; set "
                "rollout.group_size to 2 or more, or choose overlong_penalty"
            )


class RewardBoundsSettings(Settings):
    """Settings of `reward_shaping.reward_bounds`."""

    low: float | None = Field(None, description="Lower bound of the reward. null: none.")
    high: float | None = Field(None, description="Upper bound of the reward. null: none.")

    @model_validator(mode="after")
    def _check_order(self) -> RewardBoundsSettings:
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

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that advantages which divide by the group's deviation cancel the coefficient."""
        advantage = getattr(getattr(config.algorithm.settings, "advantage", None), "target", None)
        if advantage in ("grpo/group_normalized", "grpo/gigpo"):
            yield (
                f"kl_in_reward with {advantage}, which divides by the group's deviation: groups whose answers earn the "
                "same learn the KL at full strength, whatever its coefficient; use regularizers: [reference_kl], or "
                "the advantage group_centered"
            )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the forward passes of the policy at the start of the batch and of the reference."""
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
