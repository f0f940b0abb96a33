"""The main functions of a run's processes, and the model that they load.

`controller`, `trainer`, `rollout_worker` and `server` are the roles that the driver (`areal_core.driver`) starts. Only
`trainer` imports torch.
"""

from areal_core.runs.models import model_reference
from areal_core.runtime.event_loops import run_event_loop
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.member import Member, run_role

__all__ = ["Member", "RunFolder", "model_reference", "run_event_loop", "run_role"]
