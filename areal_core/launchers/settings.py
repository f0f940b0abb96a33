"""Settings of the local launcher."""

from __future__ import annotations

from pydantic import Field

from areal_core.config import Settings


class LocalSettings(Settings):
    """Processes on this machine."""

    trainer_processes: int = Field(1, ge=1, description="ranks of the trainer; the model is sharded over them")
    threads_per_process: int = Field(1, ge=1, description="CPU threads of each trainer rank")
