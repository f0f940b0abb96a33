"""Settings of the local launcher."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import Field

from areal_core.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class LocalSettings(Settings):
    """Processes on this machine."""

    trainer_processes: int = Field(1, ge=1, description="ranks of the trainer; the model is sharded over them")
    threads_per_process: int = Field(1, ge=1, description="CPU threads of each trainer rank")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Every rank has a core of this machine to itself, and where GPUs are named, one of them."""
        gpus = config.placement.training
        room, what = (os.cpu_count() or 1, "cores") if gpus is None else (len(gpus), "GPUs in placement.training")
        if self.trainer_processes > room:
            yield f"{self.trainer_processes} ranks do not fit on {room} {what}; lower launcher.trainer_processes"
