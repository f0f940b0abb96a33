"""What a program that serves by hand says to the run that its server shall join, through the run's driver.

Both questions are asked again and again, and do nothing where nothing is left to do: so a run that was resumed, and
knows nothing of the server, is joined by the next one.
"""

from __future__ import annotations

from areal_core.messages.frames import Message


class ServerJoins(Message):
    """Use the server at this address, if you do not already; answered with `ServerStanding`.

    Attributes:
        name: in logs and the live view; unique in the run.
        address: `http://host:port`, as the run reaches it.
    """

    name: str
    address: str


class ServerLeaves(Message):
    """Let go of a server: ask nothing further of it, and let it finish; answered with `ServerStanding`.

    Attributes:
        name, address: as it has joined; nothing happens to another server of this name.
    """

    name: str
    address: str


class ServerStanding(Message):
    """Where a server is in its life.

    Attributes:
        state: in words, such as `ready` or `refused`; empty where the run does not know the server.
        reason: of a server that is lost or refused.
    """

    state: str
    reason: str
