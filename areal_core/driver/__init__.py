"""`areal run`: the process groups of a run, and its execution.

    groups                  which processes a run has
    execution               from request to end: check, claim, start, watch, recover, release
    model_initialization    the process that prepares a model before the others start
    serve, serving          a server that a user starts by hand, and how it joins a run
    supervision             processes of a program that trains nothing, such as an evaluation
    auditing, resume_hint   reports about a run that has ended

`areal_core.checks` has the checks before a run, and `areal_core.runtime` the processes themselves.
"""

from areal_core.driver.execution import execute, write_run_folder
from areal_core.driver.groups import model_group, rollout_groups
from areal_core.driver.serving import Joining
from areal_core.runtime.attempts import ask_driver, claim, release
from areal_core.runtime.hub import Process
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.progress import preparation
from areal_core.runtime.supervisor import Supervisor

__all__ = [
    "ASKED_TO_STOP",
    "Joining",
    "Process",
    "Supervisor",
    "ask_driver",
    "claim",
    "execute",
    "model_group",
    "preparation",
    "release",
    "rollout_groups",
    "write_run_folder",
]
