"""The base class of every launcher's settings, and a function to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from areal_core.config.settings import Section

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config.selection import Selection


class LauncherSettings(Section):
    """Settings that every launcher has. The core reads them; a launcher derives its own settings from this class.

    Example:
        >>> from pydantic import Field
        >>> from areal_core.config import LauncherSettings
        >>> class CloudSettings(LauncherSettings):
        ...     region: str = Field("eu-west", description="Region in which machines are rented.")
        >>> settings = CloudSettings(trainer_processes=4)
        >>> settings.region, settings.trainer_processes, settings.threads_per_process
        ('eu-west', 4, 1)
    """

    trainer_processes: int | None = Field(None, ge=1)
    """Number of trainer ranks, over which the model is sharded. null: one for each GPU in placement.training, or
    one."""
    threads_per_process: int = Field(1, ge=1)
    """CPU threads of each trainer rank."""
    max_attempts_without_checkpoint: int = Field(2, ge=0)
    """How many times in a row the run restarts from its last checkpoint, after a process or a node is lost, without
    reaching a new checkpoint."""
    network_interface: str | None = None
    """Network interface for traffic between trainer ranks on several nodes. null: the interface over which their node
    reaches the driver."""

    def check(self, config: Any) -> Iterable[str]:
        """Yield a problem if `placement.training` names fewer GPUs than there are ranks: each rank needs its own."""
        gpus, ranks = config.placement.training, config.trainer_processes
        if gpus is not None and ranks > len(gpus):
            available = f"{len(gpus)} GPUs in placement.training"
            yield f"{ranks} ranks do not fit on {available}; lower launcher.trainer_processes"


def launching(launcher: Selection) -> LauncherSettings:
    """Return the settings of a launcher, or the defaults for a launcher without a settings model."""
    return launcher.settings if isinstance(launcher.settings, LauncherSettings) else LauncherSettings.model_validate({})
