"""The program that serves an environment of OpenEnv, or lists its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_agents.foreign_process import ForeignProgram

if TYPE_CHECKING:
    from areal_agents.openenv.config import OpenEnvServerSettings

PROGRAM = Path(__file__).parents[1] / "interpreter" / "areal_openenv.py"


def app_program(settings: OpenEnvServerSettings, **request: Any) -> ForeignProgram:
    """Return the program of an environment's web application.

    Args:
        settings: the application and the interpreter.
        request: what the program reads beside the name of the application.
    """
    return ForeignProgram(PROGRAM, settings, {"app": settings.app, **request}, settings.name)
