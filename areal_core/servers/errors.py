"""What can be wrong with a server, as adapters and connections say it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal_core.interfaces import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator


class RequestRefusedError(ValueError):
    """The server says that the request is wrong (4xx); no other server would say anything else.

    Args:
        message: what it says.
        status: its HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServerRefusedError(Exception):
    """This is not a server that the run can use; it is not asked again."""


class UpdateRefusedError(Exception):
    """The server says that it did not take over the weights."""


FAULTS = (ServerLostError, UpdateRefusedError, RequestRefusedError)
"""What a call to a server may end with where the server is one that the run uses."""


async def in_time(work: Awaitable[Any], seconds: float, setting: str = "") -> Any:
    """What a server brings within so many seconds; later it counts as lost. A setting is named."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        limit = f"{setting} = {seconds:g}" if setting else f"{seconds:g} s"
        raise ServerLostError(f"gave no answer within {limit}") from None


@contextmanager
def known_form() -> Iterator[None]:
    """An answer that is JSON and yet of another form than the server's own is a fault of the server."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ServerLostError(f"answered in an unknown form: {error!r:.200}") from error
