"""Programs of servers: how one is started, and whether it answers."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.inference.errors import FAULTS, RequestRefusedError, known_form
from areal_core.proxies import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.inference.adapter import ServerAdapter, ServerCommand

HEALTH_TIMEOUT_S = 5.0
"""Timeout of one health check."""


def start_program(command: ServerCommand, environment: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start the program of a server.

    Args:
        command: the command.
        environment: variables of the program, besides those of the command.
        how: further arguments of `subprocess.Popen`.

    Raises:
        RunError: the program is not installed or cannot be started.
    """
    added = {**environment, **command.environment}
    bypass_proxies(added)  # SGLang asks its own address before it serves
    try:
        return subprocess.Popen(command.arguments, env=added, **{"stdin": subprocess.DEVNULL, **how})
    except OSError as error:
        raise RunError(f"{command.arguments[0]} cannot be started: {error.strerror}") from error


async def is_healthy(adapter: ServerAdapter, address: str) -> bool:
    """Return whether a server at this address is healthy. A server that asks for another key is healthy, too."""
    connection = adapter.connect(address)
    try:
        with known_form():
            await adapter.check_health(connection, HEALTH_TIMEOUT_S)
    except RequestRefusedError as error:  # a gateway answers 404 while the server loads
        return error.status in (401, 403)
    except FAULTS:
        return False
    finally:
        connection.close()
    return True
