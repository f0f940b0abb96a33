"""`areal run`: checks of a config, its plan, its process groups, and the execution of the run.

    checking, plan, model_checks, room, fingerprints    what is checked before a run, and recorded for its resume
    groups                                              which processes a run has
    execution                                           from request to end: claim, start, watch, recover, release
    model_initialization                                the process that prepares a model before the others start
    auditing, resume_hint                               questions about a run that has ended
    health                                              `areal doctor`

The names below are public: a plugin may check a config, and run process groups of its own as a run does. The processes
themselves are the subject of `areal_core.runtime`.
"""

from areal_core.driver.execution import execute, write_run_folder
from areal_core.driver.groups import model_group, role_group, rollout_groups
from areal_core.driver.plan import make_plan
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
    "make_plan",
    "model_group",
    "preparation",
    "release",
    "role_group",
    "rollout_groups",
    "write_run_folder",
]
