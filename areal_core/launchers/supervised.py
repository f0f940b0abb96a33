"""What a supervisor knows of a node, and of a process that runs there."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.launcher import EndMeans, ProcessEnd
from areal_core.messages import ChannelClosed
from areal_core.messages.processes import Alive, EndProcess, Leave, SignalProcess

if TYPE_CHECKING:
    from areal_core.interfaces.launcher import ProcessSpecification
    from areal_core.messages import Channel
    from areal_core.messages.processes import NodeReady

BEAT_S, SLOWEST_BEAT_S = 1.0, 5.0
BEATS_PER_S = 200
"""Of nodes, and of processes, from which on each beats less often: what is heard costs the supervisor CPU."""


def beat_interval(count: int) -> float:
    """Seconds between the beats of each of so many; nobody beats so seldom that it seems silent."""
    return min(SLOWEST_BEAT_S, max(BEAT_S, count / BEATS_PER_S))


class Node:
    """A node that a warden has come from."""

    def __init__(self, channel: Channel, ready: NodeReady) -> None:
        self.name = ready.name
        self.channel = channel
        self.ready = ready
        self.heard = time.monotonic()
        self.stopped: tuple[str, ...] = ()
        self.has_left = False

    def post(self, message: Any) -> None:
        """Tell the warden; nothing happens where the node is gone."""
        with suppress(ChannelClosed):
            self.channel.post(message)

    async def dismiss(self) -> None:
        """Have everything end there; a connection that ends without this is a supervisor that is lost."""
        self.post(Leave())
        await self.channel.close()


class SupervisedProcess:
    """A process of the run; a `RunningProcess`.

    Attributes:
        specification: what it is.
        node: where it runs.
        owner: name of the process that asked for it; empty for one of the run's own.
        channel: to it, once it has come; only processes that speak come.
        phase: what it says that it is doing, and for how long; of one that does not speak no more is known than that
            it runs.
        heard: when it said something.
        stopped_at: since when its warden sees that somebody has stopped it; None where it runs.
        has_finished: whether it has said that all its work is done.
        ended: how it has ended.
    """

    def __init__(self, specification: ProcessSpecification, node: Node, owner: str) -> None:
        self.specification = specification
        self.name = specification.name
        self.node = node
        self.owner = owner
        self.channel: Channel | None = None
        self.phase = Alive("starting" if specification.speaks else "running", 0.0)
        self.heard = time.monotonic()
        self.stopped_at: float | None = None
        self.has_finished = False
        self.fell_silent = asyncio.Event()
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()

    @property
    def is_essential(self) -> bool:
        """Whether its end is the end of all."""
        return self.specification.end is EndMeans.ENDS_RUN

    @property
    def silent_s(self) -> float:
        """Seconds since a process was heard that speaks, or was stopped that does not; 0 for those that have ended."""
        if self.ended.done():
            return 0.0
        heard = self.heard if self.specification.speaks else math.inf
        return max(0.0, time.monotonic() - min(heard, self.stopped_at or math.inf))

    async def wait(self) -> ProcessEnd:
        """See `RunningProcess.wait`."""
        return await asyncio.shield(self.ended)

    async def end(self, grace_s: float = 0.0) -> ProcessEnd:
        """See `RunningProcess.end`."""
        self.node.post(EndProcess(self.name, grace_s))
        return await self.wait()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.node.post(SignalProcess(self.name, int(number)))

    def post(self, message: Any) -> None:
        """Say something; nothing happens where it does not listen, or not any more."""
        if self.channel is not None:
            with suppress(ChannelClosed):
                self.channel.post(message)
