"""Processes of the interpreter that has verifiers: the server, and the program that lists the tasks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from areal_agents.agents import HIDDEN
from areal_agents.config import resolve_secrets
from areal_agents.verifiers.traces import EnvironmentServerError
from areal_core.config import public_environment
from areal_core.errors import RunError
from areal_core.launchers import describe_exit
from areal_core.processes import bypass_proxies

if TYPE_CHECKING:
    from areal_agents.verifiers.config import TasksetSettings

PROGRAM = Path(__file__).parent / "interpreter" / "areal_verifiers.py"
KEPT_LINES = 20
"""Last lines of a program's log that are part of the message about its end."""
END_TIMEOUT_S = 5.0
"""Seconds that a server has to end after its standard input was closed."""


def list_tasks(settings: TasksetSettings, limit: int | None) -> list[dict[str, Any]]:
    """Return the data of the taskset's tasks.

    Args:
        settings: names the taskset and the interpreter.
        limit: maximum number of tasks; None for all.

    Raises:
        RunError: the interpreter cannot be started, or the taskset cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.jsonl"
        try:
            done = subprocess.run(
                _command(settings, "tasks", str(path)),
                input=_request(settings, limit),
                capture_output=True,
                env=_environment(settings),
                cwd=settings.folder,
                check=False,
            )
        except OSError as error:
            raise RunError(f"the interpreter of verifiers cannot be started: {error}") from error
        if done.returncode:
            log = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-KEPT_LINES:])
            raise RunError(
                f"the tasks of the taskset {settings.taskset_id} cannot be listed; "
                f"the program {describe_exit(done.returncode)}: {log}"
            )
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


class ServerProcess:
    """The process of a server.

    Attributes:
        address: ZeroMQ address at which it serves.
    """

    def __init__(self, process: asyncio.subprocess.Process, title: str) -> None:
        self.address = ""
        self._process = process
        self._title = title
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._logging = asyncio.ensure_future(self._copy_log())

    @classmethod
    async def start(cls, settings: TasksetSettings) -> ServerProcess:
        """Start a server, and wait until it listens.

        Raises:
            EnvironmentServerError: it cannot be started, or has ended.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(settings, "serve"),
                env=_environment(settings),
                cwd=settings.folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentServerError(f"the interpreter of verifiers cannot be started: {error}") from error
        server = cls(process, f"the verifiers server of the taskset {settings.taskset_id}")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(_request(settings, None))
            async with asyncio.timeout(settings.start_timeout_s):
                server.address = (await process.stdout.readline()).decode().strip()
            if not server.address:
                raise EnvironmentServerError(f"{server._title} {await server.wait()}")
        except TimeoutError:
            await server.end()
            limit = f"{settings.start_timeout_s:g}"
            raise EnvironmentServerError(f"{server._title} was not loaded within start_timeout_s: {limit}") from None
        except BaseException:
            await server.end()
            raise
        return server

    async def wait(self) -> str:
        """Wait until the process ends; return how it ended, with the last lines of its log."""
        code = await self._process.wait()
        await asyncio.wait({self._logging}, timeout=1.0)  # its children may hold the pipe open
        return "\n".join([f"{describe_exit(code)}; the end of its log:", *self._last_lines])

    async def end(self) -> None:
        """End the process and everything that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._logging.cancel()

    async def _copy_log(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            sys.stderr.write(f"{text}\n")


def _command(settings: TasksetSettings, *arguments: str) -> list[str]:
    return [str(settings.python), str(PROGRAM), *arguments]


def _request(settings: TasksetSettings, limit: int | None) -> bytes:
    request = {"environment": settings.environment_config(), "limit": limit}
    return json.dumps(request).encode() + b"\n"


def _environment(settings: TasksetSettings) -> dict[str, str]:
    inherited = {name: value for name, value in public_environment().items() if not name.startswith(HIDDEN)}
    variables = {**inherited, **resolve_secrets(settings.variables)}
    variables.pop("PYTHONPATH", None)
    bypass_proxies(variables)
    return variables
