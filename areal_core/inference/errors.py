"""The errors that adapters and connections raise about a server."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import MsgspecError

from areal_core.interfaces.inference import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator


class RequestRefusedError(ValueError):
    """The server refuses the request (4xx). Every other server would too.

    Args:
        message: the server's message.
        status: its HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServerRefusedError(Exception):
    """The run cannot use this server."""


class UpdateRefusedError(Exception):
    """The server reports that it did not load the weights."""


FAULTS = (ServerLostError, UpdateRefusedError, RequestRefusedError, OSError, ValueError, MsgspecError)
"""The errors of a call to a server: its own, those of the connection, and those of reading a malformed answer. They
cost that server, and never the run."""


async def in_time(work: Awaitable[Any], seconds: float, setting: str = "") -> Any:
    """Return the result of a call to a server.

    Args:
        work: the call.
        seconds: its timeout.
        setting: the setting that holds the timeout, named in the error; empty for none.

    Raises:
        ServerLostError: the call took longer.

    Example:
        >>> import asyncio
        >>> from areal_core.servers import ServerLostError, in_time
        >>> try:
        ...     asyncio.run(in_time(asyncio.sleep(60), 0.01, "update_timeout_s"))
        ... except ServerLostError as error:
        ...     print(f"the server {error}")
        the server gave no answer within update_timeout_s = 0.01
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        limit = f"{setting} = {seconds:g}" if setting else f"{seconds:g} s"
        raise ServerLostError(f"gave no answer within {limit}") from None


@contextmanager
def known_form() -> Iterator[None]:
    """Turn the errors of reading a malformed answer into `ServerLostError`: the JSON is valid, its form is not."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ServerLostError(f"answered in an unknown form: {error!r:.200}") from error
