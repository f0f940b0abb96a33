"""Settings of advantages, stages, group stages and objectives. Imports no torch, as `areal_grpo.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from areal_core.config import Settings, selections
from areal_core.interfaces import CRITIC, Pass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.interfaces import Role


class GroupNormalisedSettings(Settings):
    """Settings of `advantages.group_normalised`."""

    needs_group: ClassVar[bool] = True
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")


class GroupCentredSettings(Settings):
    """`advantages.group_centred` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class LeaveOneOutSettings(Settings):
    """`advantages.leave_one_out` has none; it needs a group."""

    needs_group: ClassVar[bool] = True


class GAESettings(Settings):
    """Settings of `generalised_advantages.gae`."""

    gamma: float = Field(1.0, ge=0, le=1, description="what one step later a reward still counts")
    gae_lambda: float = Field(
        0.95,
        ge=0,
        le=1,
        description="1 trusts the rewards alone, 0 the critic's next value; between them noise is weighed against "
        "the critic's errors",
    )
    level: Literal["token", "turn"] = Field("token", description="what a step is: a token, or a turn as a whole")
    whiten: bool = Field(
        True, description="whether advantages are brought to mean 0 and variance 1 over the tokens of the batch"
    )

    def needs(self, updates: int) -> Iterable[Role | Pass]:
        """What the critic says of each token."""
        return (Pass(CRITIC, "values", "values"),)

    def notes(self, config: RunConfig) -> Iterable[str]:
        """A critic learns only by an objective."""
        if not any(chosen.kind == "objectives" for _, chosen in selections(config.algorithm)):
            yield "gae asks a critic, and nothing teaches it: choose an objective such as value_regression"


class ReinforcePPSettings(Settings):
    """Settings of `generalised_advantages.reinforce_pp`."""

    gamma: float = Field(1.0, ge=0, le=1, description="what one token later a reward still counts")


class ValueRegressionSettings(Settings):
    """Settings of `objectives.value_regression`."""

    clip: float | None = Field(
        0.2,
        gt=0,
        description="how far values are led away from what they were before the batch; null does not bound it",
    )

    def needs(self, updates: int) -> Iterable[Role | Pass]:
        """A critic that learns, and what it said of each token before."""
        return (Pass(CRITIC, "values", "values"),)


class ZeroVarianceSettings(Settings):
    """`group_stages.zero_variance` has none; it checks that groups can vary."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """A group of one episode always has equal rewards: every group would be dropped."""
        if config.rollout.group_size == 1:
            yield (
                "zero_variance drops groups whose rewards are all equal, and with rollout.group_size 1 that is every "
                "group; set rollout.group_size to 2 or more, or leave it out"
            )
