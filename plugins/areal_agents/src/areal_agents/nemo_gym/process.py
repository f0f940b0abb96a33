"""The program that serves a resources server of NeMo Gym, or lists its example rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_agents.foreign_process import ForeignProgram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.config import InterpreterSettings

PROGRAM = Path(__file__).parents[1] / "interpreter" / "areal_nemo_gym.py"


def server_program(
    settings: InterpreterSettings, server: str, server_settings: Mapping[str, Any] | None = None
) -> ForeignProgram:
    """Return the program of a resources server.

    Args:
        settings: the interpreter.
        server: name of the server.
        server_settings: settings of the server.
    """
    request = {"server": server, "settings": dict(server_settings or {})}
    return ForeignProgram(PROGRAM, settings, request, f"NeMo Gym's {server}")
