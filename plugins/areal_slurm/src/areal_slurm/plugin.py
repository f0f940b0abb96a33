"""Components of this plugin: a launcher, and the command that submits a batch job. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, Component, hookimpl

if TYPE_CHECKING:
    from pathlib import Path


@hookimpl
def areal_launchers() -> list[Component]:
    """The launcher `slurm`."""
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
    """The command `areal slurm submit`."""
    return [
        Command(
            "submit",
            "train in a SLURM batch job that is queued again until the run is done",
            target="areal_slurm.submission:main",
        )
    ]


@hookimpl
def areal_run_started(run_dir: Path) -> None:
    """Record the last committed step, for `requeue`."""
    from areal_slurm.requeue import note_start

    note_start(run_dir)


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str, signal: int) -> None:
    """Requeue the job if SLURM has taken the allocation away."""
    from areal_slurm.requeue import requeue

    requeue(run_dir, outcome, signal)
