"""Settings of the launcher `external`."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings, Seconds


class ExternalSettings(LauncherSettings):
    """Machines that join the run with `areal node RUN_DIR`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    nodes: int = Field(1, ge=1)
    """Number of machines that the run waits for before it starts."""
    host: str | None = None
    """Address under which other machines reach the driver's machine. null: the address from which it reaches other
    networks."""
    start_timeout_s: Seconds = Field(600.0, gt=0)
    """Seconds in which all machines must join. Otherwise the run ends."""
