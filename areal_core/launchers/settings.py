"""Settings of the core's launchers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings, Seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class LocalSettings(LauncherSettings):
    """Processes on this machine."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    fork_server: bool = True
    """fork processes from one that has imported torch and transformers, instead of importing them in each"""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Every rank has a core of this machine to itself, and where GPUs are named, one of them."""
        yield from super().check(config)
        room, ranks = os.cpu_count() or 1, config.trainer_processes
        if config.placement.training is None and ranks > room:
            yield f"{ranks} ranks do not fit on {room} cores; lower launcher.trainer_processes"


class ExternalSettings(LauncherSettings):
    """Machines that somebody else brings: on each, `areal node RUN_DIR`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    nodes: int = Field(1, ge=1)
    """machines that are waited for"""
    host: str | None = None
    """address of this machine as the others reach it; null: that by which it reaches other networks"""
    start_timeout_s: Seconds = Field(600.0, gt=0)
    """seconds that they have to come"""
