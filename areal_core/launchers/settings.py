"""Settings of the local launcher."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class LocalSettings(LauncherSettings):
    """Processes on this machine."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    nodes: int = Field(1, ge=1, le=64)
    """nodes that this machine plays, with an equal share of its GPUs each: to try what a cluster would do"""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Every rank has a core of this machine to itself, and where GPUs are named, one of them."""
        gpus, ranks = config.placement.training, config.trainer_processes
        room, what = (os.cpu_count() or 1, "cores") if gpus is None else (len(gpus), "GPUs in placement.training")
        if ranks > room:
            yield f"{ranks} ranks do not fit on {room} {what}; lower launcher.trainer_processes"
