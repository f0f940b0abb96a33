"""Settings of the core's launcher."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from areal_core.config import LauncherSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class LocalSettings(LauncherSettings):
    """Run all processes on this machine."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    fork_server: bool = True
    """Fork processes from one that has already imported torch and transformers. If false, each process imports them
    itself, which takes seconds longer and more memory."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield a problem if the trainer has more ranks than the machine has cores. Ranks with GPUs may share cores."""
        yield from super().check(config)
        cores = os.cpu_count() or 1
        ranks = config.trainer_processes
        if config.placement.training is None and ranks > cores:
            yield f"{ranks} ranks do not fit on {cores} cores; lower launcher.trainer_processes"
