"""Adapters that run an agent: a Python function, a command in any language, or an HTTP service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from areal_agents.config import resolve_secrets
from areal_agents.threads import run_in_thread
from areal_core.chat import read_json
from areal_core.config import public_environment
from areal_core.launchers import describe_exit
from areal_core.processes import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_agents.config import CommandSettings, ServiceSettings
    from areal_core.sdk import Endpoint

MAX_OUTPUT_BYTES = 16 * 2**20
"""Output limit in bytes. Only the end of a command's output is kept; a service with a longer response fails."""
PIPE_DRAIN_TIMEOUT_S = 2.0
"""Seconds to wait for the rest of a program's output after it exits. A child process may keep its pipes open."""
HIDDEN = ("AREAL_", "OPENAI_", "ANTHROPIC_")
"""Prefixes of environment variables that a command does not inherit: areal's own and those of other endpoints."""
OFFERED = ("row", "endpoint", "base_url", "api_key", "model")
"""Arguments that every agent function may name, in addition to the keys of the row."""
MAX_SHOWN = 4000
"""Characters of a command's or a service's output that an error message quotes."""


class AgentFailedError(Exception):
    """An agent failed before it finished its episode. The message has the cause."""


class FunctionAgent:
    """Calls a Python function for each episode. Functions that are not coroutines run in a thread.

    The function gets the arguments that it names; see `areal_core.sdk.Agent`.

    Args:
        function: function, coroutine function or callable object.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._positional = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        self._required = [p.name for p in named if p.default is p.empty]
        self._optional = [p.name for p in parameters if p.default is not p.empty]
        called = function if inspect.isroutine(function) else type(function).__call__
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def problem(self, row: Mapping[str, Any]) -> str:
        """Return why the function cannot be called for a row, or an empty string if it can."""
        if self._positional:
            return f"the agent has positional parameters ({', '.join(self._positional)}), but areal passes keywords"
        if missing := [name for name in self._required if name not in (*OFFERED, *row)]:
            return (
                f"the agent asks for {', '.join(missing)}; it is offered {', '.join(OFFERED)}, "
                f"and the row's {', '.join(row)}"
            )
        return ""

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Run one episode and return the agent's result.

        Raises:
            AgentFailedError: the function requires an argument that the row does not have.
        """
        if problem := self.problem(row):
            raise AgentFailedError(problem)
        available = {
            **row,
            "row": row,
            "endpoint": endpoint,
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
        }
        names = [*self._required, *(name for name in self._optional if name in available)]
        arguments = available if self._takes_all else {name: available[name] for name in names}
        if self._is_coroutine:
            return await self._function(**arguments)
        result = await run_in_thread(lambda: self._function(**arguments))
        return await result if inspect.isawaitable(result) else result


class CommandAgent:
    """Runs a program for each episode. The program reads the row from standard input and the endpoint from its
    environment variables.

    The last line of its output is the result: a JSON object, or text that the run's rewards score.
    """

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Run one episode and return its result. All processes in the program's process group are killed at the end.

        Raises:
            AgentFailedError: the program cannot be started, exits with an error, or prints an invalid JSON object.
        """
        settings = self._settings
        inherited = {name: value for name, value in public_environment().items() if not name.startswith(HIDDEN)}
        variables = {**inherited, **resolve_secrets(settings.environment), **endpoint.as_environment()}
        bypass_proxies(variables, [urlsplit(endpoint.base_url).hostname or ""])
        loop = asyncio.get_running_loop()
        try:
            transport, program = await loop.subprocess_exec(
                _Program, *settings.command, cwd=settings.folder, env=variables, start_new_session=True
            )
        except OSError as error:
            raise AgentFailedError(f"the agent's command {settings.command[0]} cannot be started: {error}") from error
        try:
            stdin: Any = transport.get_pipe_transport(0)
            stdin.write(json.dumps(dict(row), default=str).encode() + b"\n")
            stdin.close()  # asyncio flushes the buffer first
            await program.exited.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PIPE_DRAIN_TIMEOUT_S):
                    await program.pipes_closed.wait()
            transport.close()
        code = transport.get_returncode()
        stdout = program.stdout.decode("utf-8", "replace")
        stderr = program.stderr.decode("utf-8", "replace")
        if code:
            output = (stderr or stdout)[-MAX_SHOWN:].strip()
            raise AgentFailedError(f"the agent's command {describe_exit(code)}: {output}")
        # `splitlines` would also split at characters such as U+2028, which JSON allows inside strings.
        last_line = re.split("[\r\n]", stdout.strip())[-1].strip("\ufeff \t")
        # Only an object is a result. A bare number or text may be the policy's own output, scored as an answer.
        if not re.match(r"""\{\s*["'}]""", last_line):
            return last_line or None
        try:
            return read_json(last_line)
        except ValueError as error:
            message = f"the last line of the agent's command starts with {{ but is not JSON: {error}"
            if last_line.startswith("{'"):
                message += "; it looks like a Python dict: print json.dumps(result)"
            raise AgentFailedError(f"{message}; the line: {last_line[:MAX_SHOWN]}") from error


class _Program(asyncio.SubprocessProtocol):
    """Collects the end of a program's output.

    `exited` is set when the program itself exits, even if one of its children keeps the pipes open.

    Attributes:
        stdout: the last bytes of its standard output.
        stderr: the last bytes of its standard error.
        exited: set when the program has exited.
        pipes_closed: set when both pipes are closed.
    """

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.exited = asyncio.Event()
        self.pipes_closed = asyncio.Event()
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.stdout if fd == 1 else self.stderr
        kept += data
        if len(kept) > 2 * MAX_OUTPUT_BYTES:
            del kept[:-MAX_OUTPUT_BYTES]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.pipes_closed.set()

    def process_exited(self) -> None:
        self.exited.set()


class ServiceAgent:
    """Sends the row and the endpoint to an HTTP service for each episode. The response is the result, as JSON."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Run one episode and return its result.

        Raises:
            AgentFailedError: the service cannot be reached, or its response is an error, too long, or not JSON.
        """
        address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        body = json.dumps({"row": dict(row), "endpoint": address}, default=str)
        headers = {"Content-Type": "application/json"}
        if self._settings.token is not None:
            headers["Authorization"] = f"Bearer {self._settings.token.get()}"
        url = self._settings.url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as client,
                client.post(url, data=body) as response,
            ):
                payload = bytearray()
                async for chunk in response.content.iter_any():
                    payload += chunk
                    if len(payload) > MAX_OUTPUT_BYTES:
                        raise AgentFailedError(
                            f"the agent's service {url} answered with more than {MAX_OUTPUT_BYTES} bytes"
                        )
                text = payload.decode(response.charset or "utf-8").lstrip("\ufeff")
                if response.status != 200:
                    raise AgentFailedError(f"the agent's service {url} answered {response.status}: {text[:MAX_SHOWN]}")
                return read_json(text) if text.strip() else None
        except aiohttp.ClientError as error:
            raise AgentFailedError(f"the request to the agent's service {url} failed: {error!r}") from error
        except (ValueError, LookupError) as error:
            raise AgentFailedError(f"the agent's service {url} answered with invalid JSON: {error}") from error
