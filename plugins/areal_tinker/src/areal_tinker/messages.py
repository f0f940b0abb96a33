"""Messages from the server to its driver."""

from __future__ import annotations

from areal_core.processes import Message


class Listening(Message):
    """The server answers requests.

    Attributes:
        address: its base URL.
        model: name of the model for clients.
    """

    address: str
    model: str
