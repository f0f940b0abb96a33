"""The error that a client can correct."""

from __future__ import annotations


class RequestError(Exception):
    """A request is wrong. The SDK raises its message in the client; nothing of the request takes effect.

    Args:
        message: what is wrong, and how to correct it.
        status: HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
