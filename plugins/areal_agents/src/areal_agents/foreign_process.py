"""Programs of areal that run in another interpreter: one that writes rows and ends, or one that serves environments.

The interpreter has a library whose dependencies areal does not share. A program imports nothing of areal. It reads one
JSON object from standard input, and a server writes its address to standard output as the first line.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from areal_agents.agents import HIDDEN
from areal_agents.config import resolve_secrets
from areal_core.config import public_environment
from areal_core.errors import RunError
from areal_core.launchers import describe_exit
from areal_core.processes import bypass_proxies, start_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.config import InterpreterSettings

KEPT_LINES = 20
"""Last lines of a program's log that are part of the message about its end."""
LOG_TIMEOUT_S = 1.0
"""Seconds to read the rest of a log after the process has ended."""
LOG_BYTES = 1 << 16
"""Bytes of a log that are read at a time, and after which a line without an end is written."""
LOGGED_CHARACTERS = 1000
"""Characters of a line that are kept for the message about a program's end."""
END_TIMEOUT_S = 5.0
"""Seconds that a server has to end after its standard input was closed."""


class EnvironmentServerError(Exception):
    """An episode was not played to its end and has no reward. The message says why."""


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """A program in another interpreter.

    Attributes:
        path: the program's file.
        settings: the interpreter.
        request: JSON object that the program reads.
        title: name of what the program serves, for messages, such as `the taskset sums`.
    """

    path: Path
    settings: InterpreterSettings
    request: Mapping[str, Any]
    title: str

    def list_rows(self, command: str) -> list[dict[str, Any]]:
        """Run the program with the arguments COMMAND FILE, and return the rows that it writes to FILE.

        Raises:
            RunError: the interpreter cannot be started, or the program failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            try:
                done = subprocess.run(
                    self._command_line(command, str(path)),
                    input=self._input(),
                    capture_output=True,
                    env=self._environment(),
                    cwd=self.settings.folder,
                    check=False,
                )
            except OSError as error:
                raise RunError(f"the interpreter of {self.title} cannot be started: {error}") from error
            if done.returncode:
                log = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-KEPT_LINES:])
                ended = describe_exit(done.returncode)
                raise RunError(f"the {command} of {self.title} cannot be listed; the program {ended}: {log}")
            if not path.is_file():
                raise RunError(f"the {command} of {self.title} cannot be listed: the program wrote none")
            return read_rows(path, f"the {command} of {self.title}")

    async def serve(self) -> ServerProcess:
        """Start the program with the argument `serve`, and wait until it has written its address.

        A caller that may not wait longer than `start_timeout_s` cancels this.

        Raises:
            EnvironmentServerError: it cannot be started, or has ended.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command_line("serve"),
                env=self._environment(),
                cwd=self.settings.folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentServerError(f"the interpreter of {self.title} cannot be started: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        server, title = ServerProcess(process), f"the server of {self.title}"
        try:
            process.stdin.write(self._input())
            server.address = (await process.stdout.readline()).decode().strip()
            if not server.address:
                raise EnvironmentServerError(f"{title} {await server.wait()}")
        except BaseException:
            await server.end()
            raise
        return server

    def _command_line(self, *arguments: str) -> list[str]:
        return [str(self.settings.python), str(self.path), *arguments]

    def _input(self) -> bytes:
        return json.dumps(self.request).encode() + b"\n"

    def _environment(self) -> dict[str, str]:
        variables = {**interpreter_environment(), **resolve_secrets(self.settings.variables)}
        bypass_proxies(variables)
        return variables


def interpreter_environment() -> dict[str, str]:
    """Return the environment variables that another interpreter inherits: no secrets, and none that name modules."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = public_environment().items()
    return {name: value for name, value in inherited if not name.startswith(HIDDEN) and name not in hidden}


class ServerProcess:
    """The process of a server.

    Attributes:
        address: address at which it serves.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.address = ""
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._logging = start_task(self._copy_log(), "copying the log of an environment server")

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait until the process ends; return how it ended, with the last lines of its log."""
        code = await self._process.wait()
        await asyncio.wait({self._logging}, timeout=LOG_TIMEOUT_S)  # a child of its own may hold the pipe open
        return "\n".join([f"{describe_exit(code)}; the end of its log:", *self._last_lines])

    async def end(self) -> None:
        """End the process and everything that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait({self._logging}, timeout=LOG_TIMEOUT_S)  # a child of its own may hold the pipe open
        self._logging.cancel()
        # asyncio closes the pipes only when they have ended, and warns if the loop has closed before.
        self._process._transport.close()  # type: ignore[attr-defined]

    async def _copy_log(self) -> None:
        assert self._process.stderr is not None
        begun = b""  # `readline` refuses long lines, and a server whose log nobody reads stops in the middle of a line
        while chunk := await self._process.stderr.read(LOG_BYTES):
            *lines, begun = (begun + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(begun) >= LOG_BYTES:
                lines, begun = [*lines, begun], b""
            for line in lines:
                self._log(line)
        self._log(begun)

    def _log(self, line: bytes) -> None:
        if text := line.decode(errors="replace").rstrip():
            self._last_lines.append(text[:LOGGED_CHARACTERS])
            sys.stderr.write(f"{text}\n")


def read_rows(path: Path, title: str) -> list[dict[str, Any]]:
    """Return the rows of a file in JSON lines. Blank lines are skipped.

    Args:
        path: the file.
        title: what the rows are, for the message.

    Raises:
        RunError: a line is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.MsgspecError as error:
                raise RunError(f"{title}, line {number}: not a JSON object: {error}") from error
    return rows
