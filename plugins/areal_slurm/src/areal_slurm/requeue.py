"""A batch job that is about to lose its allocation goes back into the queue, and the run goes on when it comes again.

Only for scripts of `areal slurm submit`, which can be started again, and only where SLURM takes the nodes: its warning
before the time limit (SIGUSR1), or another job in this one's place. Who stops a run by hand wants it to stop.
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
"""Set by the script."""

_steps: dict[Path, int] = {}
"""The last committed step of each run when this program began with it."""


def note_start(run_dir: Path) -> None:
    """Remember how far a run has come; where something was lost in it, what came before counts as well."""
    if run_dir not in _steps and VARIABLE in os.environ and (turns := int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
        print_error(f"the job was queued again; its turn {turns + 1} goes on after step {last_step(run_dir)}")
    _steps.setdefault(run_dir, last_step(run_dir))


def last_step(run_dir: Path) -> int:
    """The last committed step; 0 without one."""
    return RunFolder(run_dir).last_step or 0


def requeue(run_dir: Path, outcome: str, signal: int) -> None:
    """Queue this program's job again where its allocation is being taken away; says what it did, and what not.

    Args:
        run_dir: the folder of the run.
        outcome: of the run.
        signal: that asked it to stop; 0 where none did.
    """
    if outcome != "interrupted" or VARIABLE not in os.environ:
        return
    again = f"go on with: areal slurm submit --resume {run_dir}"
    try:
        number = own_job()
        job = read_job(number)[0]
        is_preempted = job["PreemptTime"] != "None"
        if job["JobState"] != "RUNNING" or not (is_preempted or signal == signals.SIGUSR1):
            return
        if not is_preempted and last_step(run_dir) <= _steps.get(run_dir, 0):
            limit = f"the time limit of the job {number} ({job['TimeLimit']})"
            print_error(f"no step was committed within {limit}, so the job is not queued again; give it more: {again}")
            return
        if "ArrayJobId" in job:  # the number of the last one of an array would mean all of it
            number = f"{job['ArrayJobId']}_{job['ArrayTaskId']}"
        slurm("scontrol", "requeue", number)
    except RunError as error:
        print_error(f"the job cannot be queued again: {error}; {again}")
        return
    print_error(f"the job {number} is queued again and goes on after step {last_step(run_dir)}")
