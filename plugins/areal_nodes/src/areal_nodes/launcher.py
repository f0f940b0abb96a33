"""Launcher that starts members on machines that join the run. An agent (`areal node`) runs on each of them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from areal_core.errors import RunError
from areal_core.launchers import Node, member_environment
from areal_core.processes import Peer, PeerClosed, own_address, polls_async
from areal_core.programs import print_error
from areal_nodes.messages import DescribeNode, EndMembers, MembersEnded, NodeReady, StartMembers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers import Place, ProcessGroup
    from areal_nodes.config import ExternalSettings

POLL_S = 0.1
"""Seconds between two checks of how many machines have joined."""
END_TIMEOUT_S = 5.0
"""Seconds that agents may take to report that the members of a group are killed."""


class Machine(NamedTuple):
    """A machine that has joined: the connection to its agent, and its description for the core."""

    agent: Peer
    node: Node


class ExternalLauncher:
    """A `Launcher` that also `AcceptsNodes`: the driver's hub passes the connection of each agent to `accept_node`."""

    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self.host = settings.host or own_address()
        self._machines: dict[str, Machine] = {}
        # By machine and group; the result is how the group's members on the machine ended.
        self._running: dict[tuple[str, str], asyncio.Future[str]] = {}
        self._start_numbers = itertools.count()
        self._has_begun = False

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`. The first call waits for `launcher.nodes` machines, a later call for one.

        Raises:
            RunError: too few machines have joined within `launcher.start_timeout_s`.
        """
        await self._wait_for_machines(1 if self._has_begun else self._settings.nodes)
        self._has_begun = True
        return [machine.node for _, machine in sorted(self._machines.items())]

    async def _wait_for_machines(self, count: int) -> None:
        def waiting_for() -> str:
            return f"{count} machines; joined: {', '.join(sorted(self._machines)) or 'none'}"

        limit_s = self._settings.start_timeout_s
        async for _ in polls_async(POLL_S, limit_s, log=print_error, waiting_for=waiting_for):
            if len(self._machines) >= count:
                return
        raise RunError(
            f"{len(self._machines)} of {count} machines have joined within {limit_s:g} s",
            hints=[
                "run on each machine: areal node RUN_DIR",
                f"the machines must reach the driver at {self.host}: set another address with launcher.host",
                "give them more time: launcher.start_timeout_s",
            ],
        )

    async def accept_node(self, connection: Peer) -> None:
        """See `AcceptsNodes.accept_node`: keep a machine as long as its agent is connected."""
        # Wait without a timeout: if the agent dies, its connection closes.
        ready: NodeReady = await connection.request(DescribeNode(), None, "the description of a machine")
        name = self._free_name(ready.name)
        self._machines[name] = Machine(connection, Node(name, ready.address, ready.gpus))
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, MembersEnded):
                    self._note_end(name, message.group, message.outcome)
        finally:
            del self._machines[name]
            for machine, group in list(self._running):
                if machine == name:
                    self._note_end(name, group, f"the machine {name} is no longer connected")

    def _free_name(self, name: str) -> str:
        """Return a name that no other machine has: agents on one machine, each with GPUs of its own, have one name."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(free for free in names if free not in self._machines)

    def _note_end(self, machine: str, group: str, outcome: str) -> None:
        end = self._running.pop((machine, group), None)
        if end is not None and not end.done():
            end.set_result(outcome)

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> ExternalGroup:
        """See `Launcher.start`."""
        by_machine: dict[str, dict[int, Place]] = {}
        for index, place in places.items():
            by_machine.setdefault(place.node, {})[index] = place
        # The number distinguishes late messages about an earlier start of the group.
        key = f"{group.name}/{next(self._start_numbers)}"
        ends: dict[Peer, asyncio.Future[str]] = {}
        for name, places_here in by_machine.items():
            if name not in self._machines:
                raise RunError(f"{group.name} cannot be started: the machine {name} is no longer connected")
            environments = tuple(
                {**environment, **group.environment, **member_environment(group, {index: place})}
                for index, place in places_here.items()
            )
            agent = self._machines[name].agent
            agent.notify(StartMembers(key, tuple(group.command), environments))
            ends[agent] = self._running[name, key] = asyncio.get_running_loop().create_future()
        return ExternalGroup(key, ends)

    async def close(self) -> None:
        """See `Launcher.close`. Nothing is left to do: an agent ends all members when the driver's hub closes."""


class ExternalGroup:
    """See `RunningGroup`.

    Args:
        key: name of the group in messages.
        ends: for each agent that has started members of the group, how they ended.
    """

    def __init__(self, key: str, ends: Mapping[Peer, asyncio.Future[str]]) -> None:
        self._key = key
        self._ends = ends

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        return ", ".join(await asyncio.gather(*(asyncio.shield(end) for end in self._ends.values())))

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        running = {agent: end for agent, end in self._ends.items() if not end.done()}
        for agent in running:
            with suppress(PeerClosed):
                agent.notify(EndMembers(self._key))
        if running:
            await asyncio.wait(running.values(), timeout=END_TIMEOUT_S)
