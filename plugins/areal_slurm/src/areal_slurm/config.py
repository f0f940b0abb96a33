"""Settings of the SLURM launcher."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings


class SlurmSettings(LauncherSettings):
    """Settings of the launcher for the nodes of the allocation in which areal runs."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    exclude: list[str] = Field(default_factory=list)
    """Nodes of the allocation that the run does not use, in SLURM's notation: n7, or n[3-5]."""
    host: str | None = None
    """Address under which other nodes reach the driver's node. null: the address from which it reaches them."""
    setup: str = ""
    """Shell commands to run before each process, such as `module load cuda`. If one fails, the process does not
    start."""
    wrapper: list[str] = Field(default_factory=list)
    """Words put before each process's command, such as [apptainer, exec, --nv, image.sif]."""
    python: str | None = None
    """Python to call on the nodes, inside the container if there is one. null: the driver's Python."""
    srun_options: list[str] = Field(default_factory=list)
    """Further options for srun, such as [--container-image=areal.sqsh, --container-mounts=/data]."""
