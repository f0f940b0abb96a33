"""Settings of the local launcher."""

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

    nodes: int = Field(1, ge=1, le=64)
    """nodes that this machine plays, with an equal share of its GPUs each: to try what a cluster would do"""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Every rank has a core of this machine to itself, and where GPUs are named, one of them."""
        yield from super().check(config)
        room, ranks = os.cpu_count() or 1, config.trainer_processes
        if config.placement.training is None and ranks > room:
            yield f"{ranks} ranks do not fit on {room} cores; lower launcher.trainer_processes"


class JoinedSettings(LauncherSettings):
    """Nodes that join by themselves, however they were started."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    nodes: int = Field(1, ge=1)
    """that are waited for, each with `areal join RUN_DIR`"""
    here: bool = False
    """whether this machine is one of them, without a command of its own"""
    host: str | None = None
    """address of this machine as the others reach it; null: that by which it reaches other networks"""
    joining_timeout_s: Seconds = Field(600.0, gt=0)
    """seconds that nodes have to join; the run does without those that have not"""
