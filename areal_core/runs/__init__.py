"""A run where it lies and runs: its folder, the model that its processes load, and the roles that they play.

`controller`, `trainer`, `rollout_worker` and `server` are roles: what a process of the run is
started for, by the driver (`areal_core.driver`). What is exported here is public: a plugin may read run folders and
play roles of its own (`run_role`). With `areal_core.runs.controller.RolloutHalf` it generates and scores as a run does;
only that imports torch.
"""

from areal_core.launchers.member import Member, run_role
from areal_core.runs.event_loops import run_event_loop
from areal_core.runs.folder import RunFolder
from areal_core.runs.models import model_reference

__all__ = ["Member", "RunFolder", "model_reference", "run_event_loop", "run_role"]
