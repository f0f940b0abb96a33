"""Tools of servers of the Model Context Protocol: who starts them, who asks them, and what becomes of one that dies."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from areal_agents.config import filled
from areal_agents.environments.libraries import load_library
from areal_core.processes import bypass_proxies, start_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from areal_agents.environments.config import McpServerSettings

logger = logging.getLogger(__name__)

BoundTool = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""A tool that checks the arguments that the policy gives."""
OfferedTool = tuple[dict[str, Any], BoundTool, str]
"""What a chat template is told of a tool, the tool, and where it comes from, in words."""

CLOSE_TIMEOUT_S = 20.0
"""For a server to end; the library asks, terminates and kills, 2 s each."""
MOST_PAGES = 100
"""Of a list of tools; a server that always has one more is none."""


class ToolServerError(Exception):
    """A server cannot be had: the episode fails, for no policy can do anything about it."""


class ToolError(Exception):
    """A tool did not do what it was asked; the words are for the policy."""

    def __str__(self) -> str:
        return str(self.args[0]).strip() or "the tool failed and said nothing"


class ToolServers:
    """The servers of a workflow: those of the worker, which begin once, and those that each episode has to itself.

    Args:
        servers: as the config names them.
    """

    def __init__(self, servers: Sequence[McpServerSettings]) -> None:
        self._servers = [(settings, _Server(settings)) for settings in servers]

    @asynccontextmanager
    async def offered(self) -> AsyncIterator[list[OfferedTool]]:
        """The tools for one episode, as (schema, function, where it comes from).

        Raises:
            ToolServerError: a server does not start.
        """
        own: list[_Server] = []
        try:
            tools: list[OfferedTool] = []
            for settings, shared in self._servers:
                server = shared
                if settings.per == "episode":
                    server = _Server(settings)
                    own.append(server)
                tools += [
                    (_schema(tool), partial(server.call, tool.name), server.title) for tool in await server.tools()
                ]
            yield tools
        finally:
            await asyncio.gather(*(server.close() for server in own))

    async def close(self) -> None:
        """End those of the worker."""
        await asyncio.gather(*(server.close() for _, server in self._servers))


@dataclass
class _Link:
    """A connection to a server that has told its tools; one task holds it from its beginning to its end."""

    client: Any = None
    tools: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    holder: asyncio.Task[None] | None = None


class _Server:
    def __init__(self, settings: McpServerSettings) -> None:
        self.title = f"the MCP server `{settings.title}`"
        self._settings = settings
        self._link: _Link | None = None
        self._linking = asyncio.Lock()

    async def tools(self) -> list[Any]:
        """All that it offers; see `_linked`."""
        return (await self._linked()).tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of one call; `ToolError`, or `ToolServerError` if it is lost and does not come back."""
        link = await self._linked()
        try:
            result = await link.client.call_tool(name, dict(arguments))
        except Exception as error:
            if not _is_lost(error):
                raise ToolError(str(error)) from error
            logger.warning("%s was lost during a call of %s and is restarted: %s", self.title, name, _words(error))
            await self._drop(link)
            await self._linked()
            raise ToolError("the tool's server was lost and has begun anew; what it knew before is gone") from error
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        if not text and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        return text

    async def close(self) -> None:
        """End its process; waits for that as long as `CLOSE_TIMEOUT_S`."""
        async with self._linking:
            if self._link is not None:
                await self._drop(self._link)

    async def _linked(self) -> _Link:
        """The connection, which whoever comes first opens.

        Raises:
            ToolServerError: it was not there, or had told no tools, within `start_timeout_s`.
        """
        async with self._linking:
            if self._link is not None:
                return self._link
            limit, link = self._settings.start_timeout_s, _Link()
            link.holder = start_task(self._hold(link), f"a connection to {self.title}")
            try:
                async with asyncio.timeout(limit):
                    await link.settled.wait()
            except TimeoutError:
                link.error = TimeoutError(f"it told no tools within start_timeout_s: {limit:g}")
            except asyncio.CancelledError:
                link.holder.cancel()
                raise
            if link.error is not None:
                link.holder.cancel()
                where = "what it wrote is in the log of this process, in RUN_DIR/logs"
                raise ToolServerError(f"{self.title} does not start: {_words(link.error)}; {where}") from link.error
            self._link = link
            return link

    async def _hold(self, link: _Link) -> None:
        """Opens and closes in one task, as the library needs it; ends with the event loop at the latest."""
        try:
            async with self._client() as link.client:
                cursor = None
                for _ in range(MOST_PAGES):
                    page = await link.client.list_tools(cursor=cursor)
                    link.tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                link.settled.set()
                await link.closing.wait()
        except Exception as error:  # noqa: BLE001 - of the library or the server: told to whoever waits, or later calls
            if link.settled.is_set():
                logger.warning("%s ended badly: %s", self.title, _words(error))
            link.error = error
        finally:
            link.settled.set()

    def _client(self) -> Any:
        library = load_library("tools of mcp", "mcp", "mcp")
        settings = self._settings
        if settings.url is not None:
            return library.Client(settings.url)
        assert settings.command is not None
        variables = filled(settings.environment)
        bypass_proxies(variables)
        program = library.StdioServerParameters(
            command=settings.command[0],
            args=settings.command[1:],
            env=variables,
            cwd=settings.folder,
            encoding_error_handler="replace",
        )
        return library.Client(library.stdio_client(program, errlog=sys.__stderr__ or sys.stderr))

    async def _drop(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
        link.closing.set()
        assert link.holder is not None
        _, alive = await asyncio.wait({link.holder}, timeout=CLOSE_TIMEOUT_S)
        if alive:
            link.holder.cancel()
            logger.warning("%s has not ended within %g s and is given up", self.title, CLOSE_TIMEOUT_S)


def _is_lost(error: Exception) -> bool:
    """Whether an error is one of the connection, and not the server's answer."""
    library = load_library("tools of mcp", "mcp", "mcp")
    if not isinstance(error, library.MCPError):
        return True
    return bool(error.code == library.types.CONNECTION_CLOSED)


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _schema(tool: Any) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def _text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    return f"({part.type}, which cannot be shown as text)"
