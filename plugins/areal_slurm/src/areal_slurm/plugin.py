"""What this plugin supplies: a launcher, and the batch job that goes on by itself. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, Component, hookimpl

if TYPE_CHECKING:
    from pathlib import Path


@hookimpl
def areal_launchers() -> list[Component]:
    """The nodes of an allocation."""
    return [
        Component(
            "slurm",
            "all nodes of the SLURM allocation in which areal run is started",
            target="areal_slurm.launcher:SlurmLauncher",
            config="areal_slurm.config:SlurmSettings",
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """`areal slurm submit CONFIG`."""
    return [
        Command(
            "submit",
            "train in a SLURM batch job that is queued again until the run is done",
            target="areal_slurm.submission:main",
        )
    ]


@hookimpl
def areal_run_started(run_dir: Path) -> None:
    """Remember how far the run has come."""
    from areal_slurm.requeue import note_start

    note_start(run_dir)


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str, signal: int) -> None:
    """Where SLURM has taken the allocation away, queue the job again."""
    from areal_slurm.requeue import requeue

    requeue(run_dir, outcome, signal)
