"""Settings of advantages, stages, group stages and objectives. Imports no torch, as `areal_grpo.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from areal_core.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


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


class ZeroVarianceSettings(Settings):
    """`group_stages.zero_variance` has none; it checks that groups can vary."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """A group of one episode always has equal rewards: every group would be dropped."""
        if config.rollout.group_size == 1:
            yield (
                "zero_variance drops groups whose rewards are all equal, and with rollout.group_size 1 that is every "
                "group; set rollout.group_size to 2 or more, or leave it out"
            )
