"""Tools of servers of the Model Context Protocol (MCP): start the servers, call them, restart them once if they die."""

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

from areal_agents.config import resolve_secrets
from areal_agents.environments.libraries import load_library
from areal_core.processes import bypass_proxies, start_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from areal_agents.environments.config import McpServerSettings

logger = logging.getLogger(__name__)

BoundTool = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Calls a tool with the policy's arguments, after checking them."""
OfferedTool = tuple[dict[str, Any], BoundTool, str]
"""Schema of a tool for the chat template, the tool, and where it comes from, for messages."""

CLOSE_TIMEOUT_S = 20.0
"""Seconds that a server may take to exit. The library itself asks, terminates and kills, with 2 s for each."""
MAX_PAGES = 100
"""Pages of a tool list that are read, in case a server never ends its list."""


class ToolServerError(Exception):
    """A server is not available. The episode fails, because the policy cannot do anything about it."""


class ToolError(Exception):
    """A tool call failed. The message is for the policy."""

    def __str__(self) -> str:
        return str(self.args[0]).strip() or "the tool failed without a message"


class ToolServers:
    """MCP servers of a workflow: shared ones, which start once for each worker, and one set for each episode.

    Args:
        servers: settings of the servers.
    """

    def __init__(self, servers: Sequence[McpServerSettings]) -> None:
        self._servers = [(settings, _Server(settings)) for settings in servers]

    @asynccontextmanager
    async def offered(self) -> AsyncIterator[list[OfferedTool]]:
        """Provide the tools for one episode. Servers with `per: episode` start here and end with the context.

        Raises:
            ToolServerError: a server does not start.
        """
        episode_servers: list[_Server] = []
        try:
            tools: list[OfferedTool] = []
            for settings, shared in self._servers:
                server = shared
                if settings.per == "episode":
                    server = _Server(settings)
                    episode_servers.append(server)
                tools += [
                    (_schema(tool), partial(server.call, tool.name), server.title) for tool in await server.tools()
                ]
            yield tools
        finally:
            await asyncio.gather(*(server.close() for server in episode_servers))

    async def close(self) -> None:
        """Close the servers that the episodes of this worker share."""
        await asyncio.gather(*(server.close() for _, server in self._servers))


@dataclass
class _Link:
    """A connection to a server.

    The library requires that one task opens and closes it: the `holder`.

    Attributes:
        client: client of the MCP library.
        tools: tools that the server has listed.
        error: why the connection failed.
        settled: set when the tools are listed, or the connection has failed or ended.
        closing: set to close the connection.
        holder: task that runs `_Server._hold`.
    """

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
        self._connecting = asyncio.Lock()

    async def tools(self) -> list[Any]:
        """Return all tools of the server; raises as `_connect` does."""
        return (await self._connect()).tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of one call as text.

        If the connection is lost, the server is restarted once and the call fails.

        Raises:
            ToolError: the call failed; the message is for the policy.
            ToolServerError: the server cannot be started again.
        """
        link = await self._connect()
        try:
            result = await link.client.call_tool(name, dict(arguments))
        except Exception as error:
            if not _is_lost(error):
                raise ToolError(str(error)) from error
            logger.warning(
                "%s was lost during a call of %s and is restarted: %s", self.title, name, _describe_error(error)
            )
            await self._drop(link)
            await self._connect()
            raise ToolError("the tool's server was lost and restarted; its earlier state is gone") from error
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        if not text and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        return text

    async def close(self) -> None:
        """Close the connection and wait up to `CLOSE_TIMEOUT_S` for the server's process to exit."""
        async with self._connecting:
            if self._link is not None:
                await self._drop(self._link)

    async def _connect(self) -> _Link:
        """Return the connection; the first caller opens it.

        Raises:
            ToolServerError: the server did not start and list its tools within `start_timeout_s`.
        """
        async with self._connecting:
            if self._link is not None:
                return self._link
            limit, link = self._settings.start_timeout_s, _Link()
            link.holder = start_task(self._hold(link), f"a connection to {self.title}")
            try:
                async with asyncio.timeout(limit):
                    await link.settled.wait()
            except TimeoutError:
                link.error = TimeoutError(f"it listed no tools within start_timeout_s: {limit:g}")
            except asyncio.CancelledError:
                link.holder.cancel()
                raise
            if link.error is not None:
                link.holder.cancel()
                hint = "its output is in the log of this process, in RUN_DIR/logs"
                message = f"{self.title} does not start: {_describe_error(link.error)}; {hint}"
                raise ToolServerError(message) from link.error
            self._link = link
            return link

    async def _hold(self, link: _Link) -> None:
        """Open the connection, list the tools, and close the connection when `closing` is set."""
        try:
            async with self._client() as link.client:
                cursor = None
                for _ in range(MAX_PAGES):
                    page = await link.client.list_tools(cursor=cursor)
                    link.tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                link.settled.set()
                await link.closing.wait()
        except Exception as error:  # noqa: BLE001 - `_connect` or later calls report errors of the library and the server
            if link.settled.is_set():
                logger.warning("%s ended with an error: %s", self.title, _describe_error(error))
            link.error = error
        finally:
            link.settled.set()

    def _client(self) -> Any:
        library = load_library("tools of mcp", "mcp", "mcp")
        settings = self._settings
        if settings.url is not None:
            return library.Client(settings.url)
        assert settings.command is not None
        variables = resolve_secrets(settings.environment)
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
            logger.warning("%s did not exit within %g s and is abandoned", self.title, CLOSE_TIMEOUT_S)


def _is_lost(error: Exception) -> bool:
    """Return whether an error means that the connection is lost, rather than being the server's answer."""
    library = load_library("tools of mcp", "mcp", "mcp")
    if not isinstance(error, library.MCPError):
        return True
    return bool(error.code == library.types.CONNECTION_CLOSED)


def _describe_error(error: BaseException) -> str:
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
