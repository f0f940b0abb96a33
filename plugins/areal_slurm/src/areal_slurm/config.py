"""Settings of the SLURM launcher."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings


class SlurmSettings(LauncherSettings):
    """Processes on the nodes of an allocation, which this program is inside of."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    exclude: list[str] = Field(default_factory=list)
    """nodes of the allocation that are left alone, as SLURM writes them: n7, or n[3-5]"""
    host: str | None = None
    """address of the driver's node as the others reach it; null: that from which it reaches them"""
    setup: str = ""
    """shell commands before each process, such as module load cuda; where one fails, the process does not start"""
    wrapper: list[str] = Field(default_factory=list)
    """words in front of each process's command: [apptainer, exec, --nv, image.sif]"""
    python: str | None = None
    """python of the nodes, as it is called there, within the container if there is one; null: that of the driver"""
    srun_options: list[str] = Field(default_factory=list)
    """further options of srun: [--container-image=areal.sqsh, --container-mounts=/data]"""
