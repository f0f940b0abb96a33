"""The program that serves a taskset of verifiers, or lists its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_agents.foreign_process import ForeignProgram

if TYPE_CHECKING:
    from areal_agents.verifiers.config import TasksetSettings

PROGRAM = Path(__file__).parents[1] / "interpreter" / "areal_verifiers.py"


def taskset_program(settings: TasksetSettings, limit: int | None = None) -> ForeignProgram:
    """Return the program of a taskset.

    Args:
        settings: the taskset and the interpreter.
        limit: maximum number of tasks to list; None for all.
    """
    request = {"environment": settings.environment_config(), "limit": limit}
    return ForeignProgram(PROGRAM, settings, request, f"verifiers' taskset {settings.taskset_id}")
