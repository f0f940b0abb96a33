"""A launcher: it starts the processes of a run. This one adds variables to the launcher of one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.launchers import LocalLauncher, LocalSettings
from areal_core.plugins import register
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.launchers import LocalGroup, Place, ProcessGroup


class VerboseSettings(LocalSettings):
    """Settings of `VerboseLauncher`."""

    nccl_debug: str = Field("INFO", description="Value of NCCL_DEBUG for every process of the run.")


@register("launchers")
class VerboseLauncher(LocalLauncher):
    """Start processes on this machine with NCCL's log switched on."""

    Config = VerboseSettings

    def __init__(self, settings: VerboseSettings) -> None:
        super().__init__(settings)
        self._variables = {"NCCL_DEBUG": settings.nccl_debug}

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> LocalGroup:
        """See `areal_core.launchers.Launcher.start`."""
        return await super().start(group, places, {**environment, **self._variables})
