"""From `areal serve` to the rollout controller of the run that its server joins, through the run's driver.

`areal serve` repeats its message every second, and a repetition changes nothing. A resumed run, which does not know the
server, is joined by the next message.
"""

from __future__ import annotations

from areal_core.runtime.frames import Message


class ServerJoins(Message):
    """Use the server at this address. Answered with `ServerStanding`.

    Attributes:
        name: name of the server in logs and in the live view, unique in the run.
        address: `http://host:port`, as the run reaches it.
    """

    name: str
    address: str


class ServerLeaves(Message):
    """Send no further requests to a server, and let it finish those that it has. Answered with `ServerStanding`.

    Attributes:
        name, address: those of `ServerJoins`. Nothing happens to a server with this name and another address.
    """

    name: str
    address: str


class ServerStanding(Message):
    """The state of a server.

    Attributes:
        state: the state, such as `ready` or `refused`; empty if the run does not know the server.
        reason: why it is lost or refused.
    """

    state: str
    reason: str
