"""A run as a whole: its folder and its owner, its plan, its processes, and what the terminal shows of them.

The only room that composes the rollout half and the training half of a run: `controller` and `trainer` are the roles
that processes play, `preparer` and `evaluator` the smaller ones. `execution` is what `areal run` calls, `evaluation`
what `areal eval` calls.
"""

from areal_core.runs.execution import execute
from areal_core.runs.folder import RunFolder

__all__ = ["RunFolder", "execute"]
