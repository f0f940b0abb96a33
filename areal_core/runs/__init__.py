"""A run as a whole: its folder and its owner, its plan, its processes, and what the terminal shows of them.

The only room that composes the rollout half and the training half of a run: `controller` and `trainer` are the roles
that processes play, `preparer` a smaller one. `execution` is what `areal run` calls.

What is exported here is public: a plugin may read run folders, supervise processes of its own, and be one of them.
With `areal_core.runs.controller.RolloutHalf` it generates and scores as a run does; only that imports torch.
"""

from areal_core.launchers.supervised import SupervisedProcess
from areal_core.runs.event_loops import run_event_loop
from areal_core.runs.execution import execute, write_down
from areal_core.runs.folder import RunFolder
from areal_core.runs.link import Link, LinkedProcesses, run_role
from areal_core.runs.models import model_reference
from areal_core.runs.ownership import ask_owner
from areal_core.runs.plan import make_plan
from areal_core.runs.supervisor import INTERRUPTED_EXIT_CODE, Supervisor, role_process
from areal_core.runs.terminal import Terminal
from areal_core.runs.view import RunState

__all__ = [
    "INTERRUPTED_EXIT_CODE",
    "Link",
    "LinkedProcesses",
    "RunFolder",
    "RunState",
    "SupervisedProcess",
    "Supervisor",
    "Terminal",
    "ask_owner",
    "execute",
    "make_plan",
    "model_reference",
    "role_process",
    "run_event_loop",
    "run_role",
    "write_down",
]
