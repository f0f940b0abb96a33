"""An OpenEnv server: its process, and the sessions of episodes.

A session is a WebSocket at /ws. The client sends `{"type": "reset" | "step" | "close", "data": {...}}`, and the server
answers each with `{"type": "observation", "data": {"observation", "reward", "done"}}`, or with the type `error` and
`{"message", "code"}`; see openenv.core.env_server.http_server (version 0.10). OpenEnv's own client is not used: it
needs other versions of areal's libraries, and it opens another session when one is lost, whose environment knows
nothing of the episode.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from areal_agents.foreign_http import SHOWN_CHARACTERS, HttpConnection
from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.foreign_server import ServerKeeper
from areal_agents.openenv.process import app_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from areal_agents.foreign_process import ServerProcess
    from areal_agents.openenv.config import OpenEnvSettings

RETRY_S = 1.0
"""Mean seconds between two attempts to get a session of a server that has no free one."""
LARGEST_MESSAGE = 100 * 1024**2
"""Bytes of a message, as in OpenEnv's own client. An observation may be an image."""


class SessionLimitError(Exception):
    """The server has no free session."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to an action.

    Attributes:
        observation: fields of the observation.
        reward: reward of the action; None if the environment gives none for it.
        is_done: whether the environment has ended the episode.
    """

    observation: Mapping[str, Any]
    reward: float | None
    is_done: bool


class OpenEnvServer:
    """The server of one rollout worker. The first episode starts it.

    When the server ends or hangs, all episodes in progress fail with that reason, and the next episode starts another
    server.

    Args:
        settings: the environment, and where it is served.
    """

    def __init__(self, settings: OpenEnvSettings) -> None:
        program = None if settings.app is None else app_program(settings)
        self._limit = settings.session_timeout_s
        self._keeper = ServerKeeper(settings, settings.name, program, lambda process: _Connection(settings, process))

    @asynccontextmanager
    async def session(self, arguments: Mapping[str, Any]) -> AsyncIterator[tuple[OpenEnvSession, Step]]:
        """Provide a session and the environment's first observation. Wait for one if the server has no free one.

        Args:
            arguments: arguments of the environment's reset. A server ignores those that reset does not have.

        Raises:
            EnvironmentServerError: the server cannot be started, was lost, failed, or had no free session in time.
        """
        connection = await self._keeper.connected()
        try:
            async with asyncio.timeout(self._limit) as waiting:
                session, first = await self._open(connection, arguments)
        except TimeoutError:
            if not waiting.expired():
                raise
            limit = f"{self._limit:g}"
            raise EnvironmentServerError(
                f"{connection.title} had no free session in session_timeout_s: {limit}"
            ) from None
        try:
            yield session, first
        finally:
            await session.close()

    async def close(self) -> None:
        """End the server."""
        await self._keeper.close()

    @staticmethod
    async def _open(connection: _Connection, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Step]:
        while True:
            session = await connection.open()
            try:
                return session, await session.ask("reset", arguments)
            except SessionLimitError:
                await session.close()
                await asyncio.sleep(random.uniform(0.5, 1.5) * RETRY_S)
            except BaseException:
                await session.close()
                raise


class OpenEnvSession:
    """The session of one episode.

    Args:
        connection: connection to the server.
        client: HTTP client of the socket.
        socket: the session's WebSocket.
    """

    def __init__(
        self, connection: _Connection, client: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        self._connection = connection
        self._client = client
        self._socket = socket

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        """Send a message, and return the environment's answer.

        Args:
            kind: `reset` or `step`.
            data: arguments of the environment's reset, or an action.

        Raises:
            EnvironmentServerError: the server was lost, dropped the session, reported an error, or sent nonsense.
            SessionLimitError: the server has no free session.
        """
        connection, limit = self._connection, self._connection.request_timeout_s
        try:
            async with asyncio.timeout(limit):
                message = await connection.run(self._exchange({"type": kind, "data": dict(data)}))
        except TimeoutError:
            raise EnvironmentServerError(
                f"{connection.title} did not answer a {kind} in request_timeout_s: {limit:g}"
            ) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            await connection.raise_dropped(kind, self._socket.exception())
        return self._read(kind, message.data)

    async def close(self) -> None:
        """End the session. The server ends it with the socket, so a message is not needed."""
        await self._socket.close()
        await self._client.close()

    async def _exchange(self, message: Mapping[str, Any]) -> aiohttp.WSMessage:
        with suppress(ConnectionError):  # a server that refuses a session sends the reason and closes it at once
            await self._socket.send_json(message)
        return await self._socket.receive()

    def _read(self, kind: str, text: str) -> Step:
        title = self._connection.title
        try:
            message = json.loads(text)
            data = message["data"]
            if message["type"] == "error":
                if data.get("code") == "CAPACITY_REACHED":
                    raise SessionLimitError
                reason = f"{data.get('message')} ({data.get('code')})"
                raise EnvironmentServerError(f"{title} reported an error for a {kind}: {reason:.{SHOWN_CHARACTERS}}")
            observation, reward = data["observation"], data["reward"]
            if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
                raise EnvironmentServerError(f"{title} answered a {kind} with the reward {reward!r:.100}")
            if not isinstance(observation, dict) or not isinstance(data["done"], bool):
                raise TypeError("no observation")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EnvironmentServerError(
                f"{title} answered a {kind} with something that is no observation: {text:.{SHOWN_CHARACTERS}}"
            ) from None
        return Step(observation, None if reward is None else float(reward), data["done"])


class _Connection(HttpConnection):
    """A connection that opens sessions."""

    def __init__(self, settings: OpenEnvSettings, process: ServerProcess | None) -> None:
        super().__init__(settings, settings.name, process, settings.address)
        self.request_timeout_s = settings.request_timeout_s

    async def open(self) -> OpenEnvSession:
        """Open the WebSocket of a session.

        Raises:
            EnvironmentServerError: the server was lost, or refused the socket.
        """
        client = aiohttp.ClientSession(connector=self.connector, connector_owner=False)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                socket = await self.run(self._connect(client))
        except TimeoutError:
            await client.close()
            limit = f"{self.request_timeout_s:g}"
            raise EnvironmentServerError(f"{self.title} opened no session in request_timeout_s: {limit}") from None
        except aiohttp.ClientError as error:
            await client.close()
            await self.raise_dropped("/ws", error)
        except BaseException:
            await client.close()
            raise
        return OpenEnvSession(self, client, socket)

    async def _connect(self, client: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        return await client.ws_connect(f"{self.address}/ws", max_msg_size=LARGEST_MESSAGE)
