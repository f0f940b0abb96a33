"""What the core reads of the settings of launchers, which are derived from these, and of inference servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field

from areal_core.config.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config.run_config import RunConfig

MOST_SERVERS = 100_000
"""Of a run: nobody has as many GPUs."""


class LauncherSettings(Settings):
    """What the core reads of every launcher's settings."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    trainer_processes: int | None = Field(None, ge=1)
    """ranks of the trainer, over which the model is sharded; null: one for each GPU in placement.training, or one"""
    threads_per_process: int = Field(1, ge=1)
    """CPU threads of each trainer rank"""
    max_attempts_without_checkpoint: int = Field(2, ge=0)
    """times in a row that a run goes back to its last checkpoint by itself, when a process or a node is lost, without
    coming to a new one"""
    network_interface: str | None = None
    """over which trainer ranks on several nodes speak; null: that by which their node reaches this program"""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Where GPUs are named, every rank has one of them."""
        gpus, ranks = config.placement.training, config.trainer_processes
        if gpus is not None and ranks > len(gpus):
            room = f"{len(gpus)} GPUs in placement.training"
            yield f"{ranks} ranks do not fit on {room}; lower launcher.trainer_processes"


class ServerBounds(Settings):
    """How many servers there are where they come and go with their nodes."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    minimum: int = Field(1, ge=1, le=MOST_SERVERS)
    """servers, whoever started them, that must be ready before the run begins; with fewer it goes on for
    `start_timeout_s`"""
    maximum: int = Field(ge=0, le=MOST_SERVERS)
    """servers that the run starts, wherever and whenever a node has room for one"""

    def __bool__(self) -> bool:
        return self.maximum > 0

    def __str__(self) -> str:
        return f"{self.minimum} to {self.maximum}"
