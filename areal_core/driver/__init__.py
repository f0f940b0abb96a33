"""`areal run`: the plan of process groups, the hub that they join, attempts, liveness, and what the terminal shows.

What is exported here is public: a plugin may check a config, and run process groups of its own as a run does.
"""

from areal_core.driver.attempts import ask_driver, claim, release
from areal_core.driver.driver import Driver
from areal_core.driver.execution import execute, write_down
from areal_core.driver.groups import model_group, role_group, rollout_groups
from areal_core.driver.hub import Process
from areal_core.driver.plan import make_plan
from areal_core.driver.serving import Joining
from areal_core.driver.view import preparation
from areal_core.launchers.member import ASKED_TO_STOP

__all__ = [
    "ASKED_TO_STOP",
    "Driver",
    "Joining",
    "Process",
    "ask_driver",
    "claim",
    "execute",
    "make_plan",
    "model_group",
    "preparation",
    "release",
    "role_group",
    "rollout_groups",
    "write_down",
]
