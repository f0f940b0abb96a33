"""The members of a run's process groups: placed, started, started again, and ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.driver.hub import Hub, Process
from areal_core.driver.placement import place
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd, RequestsRoom
from areal_core.launchers.member import NODES_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.launcher import Launcher, Node, Place, ProcessGroup, RunningGroup

JOIN_S, LATE_S = 600.0, 1.0
"""For a member to come to the hub; and what the hub has beyond a launcher that says all is over."""
END_S = 15.0
"""For guards to end everything once the hub has hung up."""
ROOM_S = 2.0
"""Between looks whether there is room for one more server."""


class Members:
    """Starts members of process groups through a launcher.

    Args:
        launcher: starts them.
        hub: that they join.
        log_path: the file for the output of a process, by its name.
        log: shows a line to the user.

    Attributes:
        environment: what every member is told: where the hub is, and what to show there.
        essential: the members of this attempt whose end is its end.
        may_share: set where members of groups that share their GPUs may be started now.
    """

    def __init__(
        self, launcher: Launcher, hub: Hub, log_path: Callable[[str], Path], log: Callable[[str], None]
    ) -> None:
        self._launcher, self._hub, self._log_path, self._log = launcher, hub, log_path, log
        self.environment: dict[str, str] = {}
        self.essential: list[Process] = []
        self.may_share = asyncio.Event()
        self.may_share.set()
        self._groups: dict[str, ProcessGroup] = {}
        self._running: dict[RunningGroup, set[Process]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()

    async def start(self, groups: Sequence[ProcessGroup], optional: Sequence[ProcessGroup] = ()) -> None:
        """Place groups and start them; those that run already, from an attempt before, stay.

        Args:
            groups: that must have room.
            optional: that are started whenever there is room for one.

        Raises:
            RunError: there is no room, or a group cannot be started.
        """
        groups = [group for group in groups if (group.name, 0) not in self._hub.processes]
        self._groups |= {group.name: group for group in groups}
        nodes = await self._nodes()
        places = place(groups, nodes, {process.key: process.place for process in self._hub.processes.values()})
        for group in groups:
            await self._start(group, {index: where for (name, index), where in places.items() if name == group.name})
        waiting = [group for group in optional if (group.name, 0) not in self._hub.processes]
        for group in waiting:
            self._background(self._start_with_room(group), f"room for {group.name}")

    def forget(self, role: str) -> None:
        """The processes of a role have done their part."""
        self.essential = [process for process in self.essential if process.group.role != role]
        self._groups = {name: group for name, group in self._groups.items() if group.role != role}

    def note_lost(self, process: Process) -> None:
        """Of a process nobody could say how it ended: its node is used again only where no other has room."""
        self._lost.add(process.place.node)

    async def _nodes(self) -> list[Node]:
        """The launcher's nodes, those that were lost before behind all others."""
        nodes = await self._launcher.nodes([*self._groups.values()])
        return sorted(nodes, key=lambda node: node.name in self._lost)

    def restart(self, process: Process, pause_s: float) -> None:
        """Start a member again that has ended, after a pause."""
        self._background(self._restart(process, pause_s), f"restart of {process.name}")

    async def end(self, keeps: Callable[[ProcessGroup], bool]) -> None:
        """End all members, but those that had come up and whose group may stay."""
        for task in [*self._tasks]:
            task.cancel()
        kept = {p for p in self._hub.processes.values() if keeps(p.group) and p.is_ready}
        leaving = [process for process in self._hub.processes.values() if process not in kept]
        for process in leaving:
            process.stopping = True
            self._hub.hang_up(process, "the attempt is over")
        present = [asyncio.shield(process.ended) for process in leaving if process.join is not None]
        if present:
            await asyncio.wait(present, timeout=END_S)
        running = [group for group, members in self._running.items() if not members & kept]
        for problem in await asyncio.gather(*(group.end() for group in running), return_exceptions=True):
            if isinstance(problem, Exception):
                self._log(f"processes could not be ended by the launcher: {problem}")
        for process in leaving:
            self._hub.remove(process, ProcessEnd(process.code))
        self.essential = []
        self.may_share.set()
        self._groups = {process.group.name: process.group for process in kept}

    async def _start(self, group: ProcessGroup, places: Mapping[int, Place]) -> None:
        """Start members of a group where they were placed, once nobody else computes there.

        Raises:
            RunError: the launcher cannot.
        """
        if group.shares_gpus:
            await self.may_share.wait()
        several = len({p.place.node for p in self._hub.processes.values()} | {p.node for p in places.values()}) > 1
        attempt = self._hub.credentials.attempt
        members = {
            Process(group, index, where, attempt, _environment(group, index, places, several), self._log_path(name))
            for index, where in places.items()
            for name in [group.member(index)]
        }
        for process in members:
            self._hub.processes[process.key] = process
        self.essential += sorted((p for p in members if p.is_essential), key=lambda process: process.index)
        try:
            running = await self._launcher.start(group, places, self.environment)
        except BaseException:
            for process in members:
                self._hub.processes.pop(process.key, None)
            raise
        self._running[running] = members
        start_task(self._follow(running, members), f"start of {group.name}")

    async def _follow(self, running: RunningGroup, members: set[Process]) -> None:
        """What the hub cannot see: members that never come; and give back what those had that are over."""
        over = asyncio.ensure_future(running.wait())
        await asyncio.wait({over}, timeout=JOIN_S)
        how = over.result() if over.done() else f"it has not come within {JOIN_S:g} s of its start"
        await asyncio.sleep(LATE_S)  # the hub knows more about one that had come
        for process in members:
            if process.join is None:
                process.why = process.why or f"never came: {how}"
                self._hub.remove(process, ProcessEnd(None, how))
        await asyncio.wait([asyncio.shield(process.ended) for process in members])
        await running.end()
        await over
        self._running.pop(running, None)

    async def _start_with_room(self, group: ProcessGroup) -> None:
        """Start a group as soon as there is room for it."""
        while True:
            with suppress(RunError):
                if not isinstance(self._launcher, RequestsRoom) or await self._launcher.request(group):
                    nodes = await self._nodes()
                    taken = {process.key: process.place for process in self._hub.processes.values()}
                    places = place([group], nodes, taken)
                    self._groups[group.name] = group
                    return await self._start(group, {index: where for (_, index), where in places.items()})
            await asyncio.sleep(ROOM_S)

    async def _restart(self, process: Process, pause_s: float) -> None:
        """Start a member again, where it was if that node is still there."""
        await asyncio.sleep(pause_s)
        group = process.group
        try:
            nodes = await self._nodes()
            where = process.place
            if where.node not in [node.name for node in nodes]:
                taken = {other.key: other.place for other in self._hub.processes.values()}
                where = place([group], nodes, taken)[group.name, 0]
            await self._start(group, {process.index: where})
        except RunError as error:
            self._log(f"{process.name} cannot be started again for now: {error.message}")
            self._background(self._start_with_room(group), f"room for {group.name}")

    def _background(self, work: Any, name: str) -> None:
        task = start_task(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _environment(group: ProcessGroup, index: int, places: Mapping[int, Place], several: bool) -> dict[str, str]:
    """The variables that a member works with, beside those of its group."""
    told = {"OMP_NUM_THREADS": str(group.cores_each)} if group.cores_each else {}
    if several:
        told[NODES_VARIABLE] = str(len({where.node for where in places.values()}))
    if group.role == "trainer":
        # Libraries take it for the number of their GPU, and a rank that was given one sees no other.
        before = [i for i in places if i < index and places[i].node == places[index].node and not places[i].gpus]
        local = len(before)
        told |= {"RANK": str(index), "LOCAL_RANK": str(local), "WORLD_SIZE": str(group.count)}
    return told | dict(group.environment)
