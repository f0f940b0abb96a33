"""What can be set. Imports no torch, so that a config is checked on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from areal_core.algorithms.settings import PolicyGradientSettings
from areal_core.config import LocalPath, Seconds, Secret, Selection, Settings, component
from areal_core.interfaces import ACTOR, CRITIC, REFERENCE, ForwardPass, Role
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


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
        default="outside/better_or_worse",
        description="turns rewards into advantages",
    )
    policy_loss: Selection = component(
        "policy_losses",
        default="outside/capped_reinforce",
        description="the loss of a token",
    )


class GuessSettings(Settings):
    """Settings of `environments.Guess`."""

    tries: int = Field(3, gt=0, description="answers until the number is told")
    bonus: float = Field(0.5, description="added to the reward of a first answer that is right")

    def check(self, config: RunConfig) -> Iterable[str]:
        """A bonus is for the first of several answers."""
        if self.bonus and self.tries == 1:
            yield "a bonus for the first answer means nothing where there is one try"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Long episodes are told."""
        if self.tries > 10:
            yield f"up to {self.tries} answers in each of {config.steps} steps take long"


class NotSolvedSettings(Settings):
    """Settings of `group_filters.not_solved`."""

    share: float = Field(0.9, gt=0, le=1, description="of right answers, from which on a prompt is solved")


class KLInRewardSettings(Settings):
    """Settings of `batch_transforms.kl_in_reward`."""

    coefficient: float = Field(0.05, ge=0, description="what a nat of distance from the reference costs")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """What the policy and its reference say of each token."""
        return (
            ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
            ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),
        )


class ValueSettings(Settings):
    """Settings of `auxiliary_losses.value`."""

    scale: float = Field(0.5, gt=0, description="of the squared error")

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """A critic that learns."""
        return (CRITIC,)


class LinesSettings(Settings):
    """Settings of `trackers.Lines`."""

    folder: LocalPath | None = Field(None, description="where the file goes; by default the run folder")
    token: Secret | None = Field(None, description="whose file it is: env:NAME")
    patience_s: Seconds = Field(5.0, gt=0, description="seconds that a full disk is waited for")
