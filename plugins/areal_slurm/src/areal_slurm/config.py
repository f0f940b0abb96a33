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
    """address of the supervisor's node as the others reach it; null: that from which it reaches them"""
    setup: str = ""
    """shell commands on each node before anything starts, such as module load cuda; a failing one stops the node"""
    wrapper: list[str] = Field(default_factory=list)
    """words in front of a node's command: [apptainer, exec, --nv, image.sif]"""
    python: str | None = None
    """python of the nodes, as it is called there, within the container if there is one; null: that of this program"""
    srun_options: list[str] = Field(default_factory=list)
    """further options of srun: [--container-image=areal.sqsh, --container-mounts=/data]"""
