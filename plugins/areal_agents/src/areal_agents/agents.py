"""Ways to bring an agent: a function, a command in any language, a service that is called for each episode."""

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

from areal_agents.config import filled
from areal_agents.threads import run_in_thread
from areal_core.chat import read_json
from areal_core.config import public_environment
from areal_core.launchers import describe_exit
from areal_core.processes import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from areal_agents.config import CommandSettings, ServiceSettings
    from areal_core.sdk import Endpoint

MOST_OUTPUT = 16 * 2**20
"""Bytes that are kept of what a command writes, what comes before them is left out; and of a service's answer."""
LAST_WORDS_S = 2.0
"""For what a program has written, once it has ended, to be read; what it has left behind may hold its pipes open."""
HIDDEN = ("AREAL_", "OPENAI_", "ANTHROPIC_")
"""How the names of variables begin that no program of others sees: the run's own, and those of other endpoints."""
OFFERED = ("row", "endpoint", "base_url", "api_key", "model")
"""What an agent may name, beside the keys of the row."""
SHOWN = 4000
"""Characters of a command's errors in a message."""


class AgentFailedError(Exception):
    """An agent did not play its episode to the end; says what became of it."""


class FunctionAgent:
    """Calls a function of a user's with those arguments that it names; one that is no coroutine, in a thread.

    Args:
        function: see `areal_core.sdk.Agent`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._by_place = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        self._required = [p.name for p in named if p.default is p.empty]
        self._optional = [p.name for p in parameters if p.default is not p.empty]
        called = function if inspect.isroutine(function) else type(function).__call__
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def problem(self, row: Mapping[str, Any]) -> str:
        """Why the function cannot be called for a row; empty where it can be."""
        if self._by_place:
            return f"the agent takes {', '.join(self._by_place)} by place, and arguments come by name"
        if missing := [name for name in self._required if name not in (*OFFERED, *row)]:
            asked = f"the agent asks for {', '.join(missing)}"
            return f"{asked}; it is offered {', '.join(OFFERED)}, and the row's {', '.join(row)}"
        return ""

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Play one episode."""
        if told := self.problem(row):
            raise AgentFailedError(told)
        own = (row, endpoint, endpoint.base_url, endpoint.api_key, endpoint.model)
        offered = {**row, **dict(zip(OFFERED, own, strict=True))}
        names = [*self._required, *(name for name in self._optional if name in offered)]
        given = offered if self._takes_all else {name: offered[name] for name in names}
        if self._is_coroutine:
            return await self._function(**given)
        result = await run_in_thread(lambda: self._function(**given))
        return await result if inspect.isawaitable(result) else result


class CommandAgent:
    """Runs a program for each episode: the row is its standard input, the model is in its environment.

    Its result is its last line: an object in JSON, or else the answer that the run's rewards score.
    """

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Play one episode; with it everything in the program's group ends."""
        settings = self._settings
        own = {name: value for name, value in public_environment().items() if not name.startswith(HIDDEN)}
        variables = {**own, **filled(settings.environment), **endpoint.as_environment()}
        bypass_proxies(variables, [urlsplit(endpoint.base_url).hostname or ""])
        loop = asyncio.get_running_loop()
        try:
            transport, program = await loop.subprocess_exec(
                _Program, *settings.command, cwd=settings.folder, env=variables, start_new_session=True
            )
        except OSError as wrong:
            raise AgentFailedError(f"the agent's command {settings.command[0]} cannot be started: {wrong}") from wrong
        try:
            given: Any = transport.get_pipe_transport(0)
            given.write(json.dumps(dict(row), default=str).encode() + b"\n")
            given.close()  # when all of it is written
            await program.exited.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await program.silent.wait()
            transport.close()
        code = transport.get_returncode()
        out, error = (said.decode("utf-8", "replace") for said in program.said)
        if code:
            raise AgentFailedError(f"the agent's command {describe_exit(code)}: {(error or out)[-SHOWN:].strip()}")
        # Not `splitlines`: JSON may have other ends of lines in its texts.
        last = re.split("[\r\n]", out.strip())[-1].strip("\ufeff \t")
        # A number or a text may be what the policy said, and no judgement of it; `{1, 2}` is a text.
        if not re.match(r"""\{\s*["'}]""", last):
            return last or None
        try:
            return read_json(last)
        except ValueError as wrong:
            told = f"the last line of the agent's command begins with {{ and is no JSON: {wrong}"
            hint = "; it is a dict as Python prints it: print json.dumps(result)" * last.startswith("{'")
            raise AgentFailedError(f"{told}{hint}; the line: {last[:SHOWN]}") from wrong


class _Program(asyncio.SubprocessProtocol):
    """The end of what a program writes; that it has ended is known although others hold its pipes open.

    Attributes:
        said: to its output and its errors.
        exited: when it has ended.
        silent: when both pipes are closed.
    """

    def __init__(self) -> None:
        self.said = bytearray(), bytearray()
        self.exited, self.silent = asyncio.Event(), asyncio.Event()
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.said[fd - 1]
        kept += data
        if len(kept) > 2 * MOST_OUTPUT:
            del kept[:-MOST_OUTPUT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.silent.set()

    def process_exited(self) -> None:
        self.exited.set()


class ServiceAgent:
    """Calls a service of the user's for each episode: a row and an endpoint in JSON, and its result comes back."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    async def __call__(self, *, row: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Play one episode."""
        told = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        body = json.dumps({"row": dict(row), "endpoint": told}, default=str)
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
                said = bytearray()
                async for piece in response.content.iter_any():
                    said += piece
                    if len(said) > MOST_OUTPUT:
                        raise AgentFailedError(f"the agent's service {url} answered with more than {MOST_OUTPUT} bytes")
                text = said.decode(response.charset or "utf-8").lstrip("\ufeff")
                if response.status != 200:
                    raise AgentFailedError(f"the agent's service {url} answered {response.status}: {text[:SHOWN]}")
                return read_json(text) if text.strip() else None
        except aiohttp.ClientError as error:
            raise AgentFailedError(f"the agent's service {url} cannot be asked: {error!r}") from error
        except (ValueError, LookupError) as error:
            raise AgentFailedError(f"the agent's service {url} answered with no JSON: {error}") from error
