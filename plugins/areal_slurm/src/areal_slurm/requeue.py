"""Requeue a batch job that is about to lose its allocation; the run resumes when the job starts again.

This is only for scripts of `areal slurm submit`, which can be started again, and only if SLURM takes the nodes away:
with its warning before the time limit (SIGUSR1), or by preemption. A user who stops a run by hand wants it to stop.
"""

from __future__ import annotations

import os
import signal as signals
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.programs import RunFolder, print_error
from areal_slurm.allocation import own_job, read_job, slurm

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "AREAL_SLURM_REQUEUE"
"""Environment variable that the script sets."""

_steps: dict[Path, int] = {}
"""Last committed step of each run when this program started it."""


def note_start(run_dir: Path) -> None:
    """Record the last committed step of a run, and log it if the job was requeued. Later calls change nothing."""
    if run_dir not in _steps and VARIABLE in os.environ:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts:
            print_error(f"the job was requeued; start {restarts + 1} resumes after step {last_step(run_dir)}")
    _steps.setdefault(run_dir, last_step(run_dir))


def last_step(run_dir: Path) -> int:
    """Return the last committed step; 0 if there is none."""
    return RunFolder(run_dir).last_step or 0


def requeue(run_dir: Path, outcome: str, signal: int) -> None:
    """Requeue this program's job if its allocation is being taken away, and log what was done.

    Args:
        run_dir: folder of the run.
        outcome: outcome of the run.
        signal: number of the signal that asked it to stop, or 0.
    """
    if outcome != "interrupted" or VARIABLE not in os.environ:
        return
    hint = f"resume with: areal slurm submit --resume {run_dir}"
    try:
        job_id = own_job()
        job = read_job(job_id)[0]
        is_preempted = job["PreemptTime"] != "None"
        if job["JobState"] != "RUNNING" or not (is_preempted or signal == signals.SIGUSR1):
            return
        if not is_preempted and last_step(run_dir) <= _steps.get(run_dir, 0):
            limit = f"the time limit of the job {job_id} ({job['TimeLimit']})"
            print_error(f"no step was committed within {limit}, so the job is not requeued; use a longer one: {hint}")
            return
        if "ArrayJobId" in job:  # the id of the last job of an array would requeue the whole array
            job_id = f"{job['ArrayJobId']}_{job['ArrayTaskId']}"
        slurm("scontrol", "requeue", job_id)
    except RunError as error:
        print_error(f"the job cannot be requeued: {error}; {hint}")
        return
    print_error(f"the job {job_id} is requeued and resumes after step {last_step(run_dir)}")
