"""Members on machines that somebody else brings, with torchrun, mpirun, ssh or kubectl: an agent runs on each.

The agent (`areal node`, see `node.py`) connects to the driver's hub and starts what the driver places there.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node
from areal_core.launchers.machine import own_address
from areal_core.launchers.places import member_environment
from areal_core.messages import Done, Peer, PeerClosed
from areal_core.messages.hub import EndMembers, MembersEnded, NodeReady, StartMembers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import Place, ProcessGroup
    from areal_core.launchers.settings import ExternalSettings

POLL_S = 0.1
PROGRESS_S = 10.0


class ExternalLauncher:
    """See `Launcher`."""

    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self.host = settings.host or own_address()
        self._nodes: dict[str, tuple[Peer, Node]] = {}
        self._groups: dict[tuple[str, str], asyncio.Future[str]] = {}
        self._has_begun = False
        self._numbers = itertools.count()

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: waits until enough have come; later, those that are there."""
        began = told = time.monotonic()
        count, limit = self._settings.nodes, self._settings.start_timeout_s
        while len(self._nodes) < (1 if self._has_begun else count):
            now = time.monotonic()
            if now - began > limit:
                raise RunError(
                    f"{len(self._nodes)} of {count} machines have come within {limit:g} s",
                    hints=["on each: areal node RUN_DIR", f"they must reach this one: launcher.host={self.host}"],
                )
            if now - told > PROGRESS_S:
                told = now
                there = ", ".join(sorted(self._nodes)) or "none"
                sys.stderr.write(f"waited {now - began:.0f} s for {count} machines; here: {there}\n")
            await asyncio.sleep(POLL_S)
        self._has_begun = True
        return [node for _, (_, node) in sorted(self._nodes.items())]

    async def take_node(self, peer: Peer, ready: NodeReady, number: int) -> None:
        """A machine offers itself to the driver's hub."""
        name, copies = ready.name, itertools.count(2)
        while name in self._nodes:  # several agents of one machine, each with GPUs of its own
            name = f"{ready.name}-{next(copies)}"
        self._nodes[name] = peer, Node(name, ready.address, ready.gpus)
        peer.reply(number, Done())
        try:
            while True:
                message = await peer.receive()
                if isinstance(message, MembersEnded):
                    self._end(name, message.group, message.how)
        finally:
            del self._nodes[name]
            for node, group in list(self._groups):
                if node == name:
                    self._end(node, group, f"the machine {node} has left")

    def _end(self, node: str, group: str, how: str) -> None:
        ended = self._groups.pop((node, group), None)
        if ended is not None and not ended.done():
            ended.set_result(how)

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> ExternalGroup:
        """See `Launcher.start`."""
        by_node: dict[str, dict[int, Place]] = {}
        for index, place in places.items():
            by_node.setdefault(place.node, {})[index] = place
        ended: dict[Peer, asyncio.Future[str]] = {}
        key = f"{group.name}/{next(self._numbers)}"  # a late word of a former start means nothing to this one
        for node, own in by_node.items():
            if node not in self._nodes:
                raise RunError(f"the machine {node} has left")
            peer, _ = self._nodes[node]
            told = tuple(
                {**environment, **group.environment, **member_environment(group, {index: place})}
                for index, place in own.items()
            )
            ended[peer] = self._groups[node, key] = asyncio.get_running_loop().create_future()
            peer.notify(StartMembers(key, tuple(group.command), told))
        return ExternalGroup(key, ended)

    async def close(self) -> None:
        """See `Launcher.close`: agents end what they have started when the hub is gone."""


class ExternalGroup:
    """See `RunningGroup`."""

    def __init__(self, key: str, ended: Mapping[Peer, asyncio.Future[str]]) -> None:
        self._key, self._ended = key, ended

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        return ", ".join(await asyncio.gather(*(asyncio.shield(one) for one in self._ended.values())))

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        for peer, ended in self._ended.items():
            if not ended.done():
                with suppress(PeerClosed):
                    peer.notify(EndMembers(self._key))
        await asyncio.wait({asyncio.ensure_future(self.wait())}, timeout=5.0)
