"""A connection to an environment server over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.foreign_server import ServerConnection

if TYPE_CHECKING:
    from typing import NoReturn

    from areal_agents.config import EnvironmentServerSettings
    from areal_agents.foreign_process import ServerProcess

SHOWN_CHARACTERS = 1000
"""Characters of a server's answer that are part of an error message."""
IDLE_S = 10.0
"""Seconds that an idle connection stays open: less than at the servers, so that no request meets a closing one."""
LOSS_S = 2.0
"""Seconds to find out how a server ended that has dropped a request."""


class HttpConnection(ServerConnection):
    """A connection over HTTP. Any answer of the server is a healthy one.

    Args:
        settings: timeouts.
        name: name of the server, for messages.
        process: process of the server; None if the worker did not start it.
        address: address of a server that the worker did not start.

    Attributes:
        address: address of the server, without a slash at its end.
        title: name and address of the server, for messages.
        connector: connections, which all clients of the server share.
    """

    def __init__(
        self, settings: EnvironmentServerSettings, name: str, process: ServerProcess | None, address: str | None
    ) -> None:
        self.address = (process.address if process else str(address)).rstrip("/")
        self.title = f"the server of {name} at {self.address}"
        super().__init__(settings, self.title, process)
        self.connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)

    async def ask_health(self) -> None:
        """Return when the server has answered anything; see `ServerConnection`."""
        try:
            async with (
                aiohttp.ClientSession(connector=self.connector, connector_owner=False) as client,
                client.get(f"{self.address}/"),
            ):
                pass
        except aiohttp.ClientError as error:
            raise EnvironmentServerError(f"cannot be reached: {error!r}") from error

    async def release(self) -> None:
        """Close the connector."""
        await self.connector.close()

    async def raise_dropped(self, request: str, error: BaseException | None = None) -> NoReturn:
        """Raise the reason why the server has dropped a request. A process that ends drops its connections first.

        Args:
            request: the request, for the message.
            error: the client's error.

        Raises:
            EnvironmentServerError: always.
        """
        await self.raise_loss(LOSS_S)
        reason = f": {error!r}" if error else ""
        raise EnvironmentServerError(f"{self.title} dropped the request {request}{reason}") from error
