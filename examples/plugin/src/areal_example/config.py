"""What can be set. Imports no torch, so that a config is checked on any machine."""

from __future__ import annotations

from typing import ClassVar

from areal_core.config import Selection, Settings, component
from areal_core.sdk import PolicyGradientSettings
from pydantic import Field


class BrevitySettings(Settings):
    """Settings of `rewards.brevity`."""

    free_tokens: int = Field(10, ge=0, description="an answer of up to so many tokens is worth 1")


class DoublingsSettings(Settings):
    """Settings of `datasets.Doublings`."""

    count: int = Field(50, gt=0, description="rows, which begin at 0+0=")


class SelfCheckSettings(Settings):
    """Settings of `workflows.SelfCheck`."""

    question: str = Field(" Is that right? ", description="asked behind the first answer")


class BetterOrWorseSettings(Settings):
    """Settings of `advantages.better_or_worse`."""

    needs_group: ClassVar[bool] = True
    margin: float = Field(1e-4, ge=0, description="rewards so close to the mean count as equal to it")


class CappedReinforceSettings(Settings):
    """Settings of `policy_losses.capped_reinforce`."""

    cap: float = Field(2.0, gt=0, description="the greatest weight of a token")


class BetterSettings(PolicyGradientSettings):
    """The algorithm of this plugin: two defaults, everything else as the core composes it."""

    advantage: Selection = component(
        "advantages",
        default="example/better_or_worse",
        description="turns rewards into advantages",
    )
    policy_loss: Selection = component(
        "policy_losses",
        default="example/capped_reinforce",
        description="the loss of a token",
    )
