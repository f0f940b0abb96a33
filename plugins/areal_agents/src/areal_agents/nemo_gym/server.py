"""A resources server of NeMo Gym: its process, and requests over HTTP.

An episode begins with a POST of its row to /seed_session, calls each tool by a POST to the tool's name, and ends with a
POST of the row and the policy's answers to /verify. Cookies carry the state; see nemo_gym.base_resources_server.
"""

from __future__ import annotations

import json
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp

from areal_agents.foreign_http import SHOWN_CHARACTERS, HttpConnection
from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.foreign_server import ServerKeeper
from areal_agents.nemo_gym.process import server_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from areal_agents.foreign_process import ServerProcess
    from areal_agents.nemo_gym.config import NemoGymSettings


class ResourcesServer:
    """The resources server of one rollout worker. The first episode starts it.

    When the server ends or hangs, all episodes in progress fail with that reason, and the next episode starts another
    server.

    Args:
        settings: which server, and where it is.
    """

    def __init__(self, settings: NemoGymSettings) -> None:
        program = None if settings.address else server_program(settings, settings.server, settings.settings)
        self._keeper = ServerKeeper(
            settings, f"NeMo Gym's {settings.server}", program, lambda process: _Connection(settings, process)
        )

    @asynccontextmanager
    async def seed(self, row: Mapping[str, Any]) -> AsyncIterator[ResourcesSession]:
        """Provide the session of one episode, which /seed_session has prepared for a row.

        Raises:
            EnvironmentServerError: the server cannot be started, was lost, or refused the row.
        """
        connection = await self._keeper.connected()
        async with connection.client() as client:
            session = ResourcesSession(connection, client)
            await session.seed(row)
            yield session

    async def close(self) -> None:
        """End the server."""
        await self._keeper.close()


class ResourcesSession:
    """One episode at a resources server.

    Args:
        connection: connection to the server.
        client: HTTP client with the cookies of this episode.
    """

    def __init__(self, connection: _Connection, client: aiohttp.ClientSession) -> None:
        self._connection = connection
        self._client = client

    async def seed(self, row: Mapping[str, Any]) -> None:
        """Prepare the episode of a row.

        Raises:
            EnvironmentServerError: the server failed, or offers its tools over MCP only.
        """
        answer = await self._post_row("/seed_session", row)
        if answer.get("mcp"):
            raise EnvironmentServerError(
                f"{self._connection.title} offers its tools over MCP, which the workflow nemo_gym does not use"
            )

    async def call(self, tool: str, arguments: Any) -> str:
        """Return the text that a tool answers, be it an error.

        Raises:
            EnvironmentServerError: the server was lost, or the tool timed out.
        """
        _, text = await self._connection.post(self._client, f"/{quote(tool, safe='')}", arguments)
        return text

    async def verify(self, row: Mapping[str, Any], response: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward and the other numbers that /verify adds to its request.

        Raises:
            EnvironmentServerError: the server failed, or its answer has no finite reward.
        """
        answer = await self._post_row("/verify", {**row, "response": response})
        reward = answer.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentServerError(
                f"{self._connection.title} answered /verify without a finite reward: {reward!r:.100}"
            )
        numbers = {
            name: float(value)
            for name, value in answer.items()
            if name not in row and name != "reward" and isinstance(value, int | float) and math.isfinite(value)
        }
        return float(reward), numbers

    async def _post_row(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the server's own routes, whose failure is the episode's."""
        title = self._connection.title
        status, text = await self._connection.post(self._client, path, body)
        if status != 200:
            raise EnvironmentServerError(f"{title} answered {path} with {status}: {text[-SHOWN_CHARACTERS:]}")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if path == "/seed_session" and answer is None:  # a server may answer nothing
            return {}
        if not isinstance(answer, dict):
            raise EnvironmentServerError(f"{title} answered {path} with no JSON object: {text[:SHOWN_CHARACTERS]}")
        return answer


class _Connection(HttpConnection):
    """A connection with a client for each episode."""

    def __init__(self, settings: NemoGymSettings, process: ServerProcess | None) -> None:
        super().__init__(settings, f"NeMo Gym's {settings.server}", process, settings.address)
        self._timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s)

    def client(self) -> aiohttp.ClientSession:
        """Return an HTTP client with cookies of its own."""
        return aiohttp.ClientSession(
            connector=self.connector,
            connector_owner=False,
            cookie_jar=aiohttp.CookieJar(unsafe=True, quote_cookie=False),  # also from hosts that are numbers
            timeout=self._timeout,
        )

    async def post(self, client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
        """Return the status and the text of an answer.

        Raises:
            EnvironmentServerError: the server was lost, dropped the request, or did not answer in time.
        """
        return await self.run(self._post(client, path, body))

    async def _post(self, client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
        try:
            async with client.post(f"{self.address}{path}", json=body) as answer:
                return answer.status, (await answer.read()).decode(errors="replace")
        except TimeoutError:
            limit = f"{self._timeout.total:g}"
            raise EnvironmentServerError(f"{self.title} did not answer {path} in request_timeout_s: {limit}") from None
        except aiohttp.ClientError as error:
            await self.raise_dropped(path, error)
