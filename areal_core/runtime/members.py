"""The members of a run's process groups: placed, started, restarted and ended.

    start ──> _launch ──> (the process joins the hub) ──> ended ──> restart ──> _restart ──> _launch
                 │                                                                 │ no room
                 └──> _follow, one task a launcher call: removes members           └──> _start_when_there_is_room
                      that never join, frees the resources of those that ended

`Supervisor` calls `start`, `restart` and `end`.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessEnd, RequestsRoom
from areal_core.runtime.environment import NODES_VARIABLE, START_VARIABLE
from areal_core.runtime.hub import Hub, Process
from areal_core.runtime.placement import Places, place_groups
from areal_core.waiting import polls_async

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.launcher import Launcher, Node, Place, ProcessGroup, RunningGroup

JOIN_TIMEOUT_S = 600.0
"""Seconds for a member to join the hub after its start."""
EXIT_REPORT_S = 1.0
"""Seconds for the guard's exit report to arrive after the launcher has reported that the members have ended."""
END_TIMEOUT_S = 15.0
"""Seconds for guards to kill everything when an attempt ends. Then the launcher kills what is left."""
ROOM_POLL_S = 2.0
"""Seconds between two checks whether there is room for an optional group."""


class Members:
    """Starts members of process groups through a launcher.

    Args:
        launcher: starts them.
        hub: they join it.
        log_path: returns the file for the output of a process, by its name.
        log: shows a line to the user.

    Attributes:
        environment: variables of every member: where the hub is, and the credentials for it.
        essential: the members of this attempt whose end is its end, by index within their group.
        may_use_shared_gpus: set while members that share their GPUs with the trainer may be started.
    """

    def __init__(
        self, launcher: Launcher, hub: Hub, log_path: Callable[[str], Path], log: Callable[[str], None]
    ) -> None:
        self._launcher = launcher
        self._hub = hub
        self._log_path = log_path
        self._log = log
        self.environment: dict[str, str] = {}
        self.essential: list[Process] = []
        self.may_use_shared_gpus = asyncio.Event()
        self.may_use_shared_gpus.set()
        self._groups: dict[str, ProcessGroup] = {}
        self._running: dict[RunningGroup, set[Process]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost_nodes: set[str] = set()
        self._starts = itertools.count(1)
        self._reserved: Places = {}
        """Places of members that are about to be started: the hub does not know them yet."""

    async def start(self, groups: Sequence[ProcessGroup], optional: Sequence[ProcessGroup] = ()) -> None:
        """Place groups and start them. Groups that still run, from an earlier attempt, stay as they are.

        Args:
            groups: must have room.
            optional: each is started as soon as there is room for it.

        Raises:
            RunError: there is no room, or a group cannot be started.
        """
        groups = [group for group in groups if (group.name, 0) not in self._hub.processes]
        self._groups |= {group.name: group for group in groups}
        nodes = await self._nodes()
        with self._reserving(place_groups(groups, nodes, self._taken(), self._sharing())) as places:
            for group in groups:
                await self._launch(group, places)
        for group in optional:
            if (group.name, 0) not in self._hub.processes:
                self._start_task(self._start_when_there_is_room(group), f"room for {group.name}")

    def restart(self, process: Process, pause_s: float) -> None:
        """Start a member that has ended again, after a pause."""
        self._start_task(self._restart(process, pause_s), f"restart of {process.name}")

    def mark_done(self, role: str) -> None:
        """Let the ended processes of a role no longer count: their work is done."""
        self.essential = [process for process in self.essential if process.group.role != role]
        self._groups = {name: group for name, group in self._groups.items() if group.role != role}

    def avoid_node(self, node: str) -> None:
        """Prefer other nodes from now on: a process was lost here, and nothing has reported its exit code."""
        self._lost_nodes.add(node)

    async def end(self, keeps: Callable[[ProcessGroup], bool]) -> None:
        """Terminate all members except ready ones whose group may stay. Return when they have ended.

        Args:
            keeps: returns whether the members of a group may stay.
        """
        for task in [*self._tasks]:
            task.cancel()
        kept = {process for process in self._hub.processes.values() if keeps(process.group) and process.is_ready}
        leaving = [process for process in self._hub.processes.values() if process not in kept]
        for process in leaving:
            process.is_stopping = True
            self._hub.terminate(process, "the attempt is over")
        joined = [asyncio.shield(process.ended) for process in leaving if process.join is not None]
        if joined:
            await asyncio.wait(joined, timeout=END_TIMEOUT_S)
        running = [group for group, members in self._running.items() if not members & kept]
        for problem in await asyncio.gather(*(group.end() for group in running), return_exceptions=True):
            if isinstance(problem, Exception):
                self._log(f"the launcher failed to end processes: {problem}")
        for process in leaving:
            self._hub.remove(process, ProcessEnd(process.code))
        self.essential = []
        self.may_use_shared_gpus.set()
        self._groups = {process.group.name: process.group for process in kept}

    async def _launch(self, group: ProcessGroup, reserved: Places) -> None:
        """Start the members of a group that have places. Those that share GPUs wait for the end of the trainer's turn.

        Args:
            group: the group.
            reserved: places of its members, and maybe of others.

        Raises:
            RunError: the launcher cannot start them.
        """
        places = {index: place for (name, index), place in reserved.items() if name == group.name}
        if group.shares_gpus:
            await self.may_use_shared_gpus.wait()
        members = self._make_processes(group, places)
        for process in members:
            self._hub.add(process)
        self.essential += [process for process in members if process.is_essential]
        start = members[0].start
        numbered = replace(group, environment={**group.environment, START_VARIABLE: str(start)})
        try:
            running = await self._launcher.start(numbered, places, self.environment)
        except BaseException:
            for process in members:
                self._hub.discard(process)
            raise
        self._running[running] = set(members)
        start_task(self._follow(running, members), f"start of {group.name}")

    def _make_processes(self, group: ProcessGroup, places: Mapping[int, Place]) -> list[Process]:
        nodes = {place.node for place in self._taken().values()} | {place.node for place in places.values()}
        start = next(self._starts)
        return [
            Process(
                group,
                index,
                places[index],
                self._hub.credentials.attempt,
                variables_of(group, index, places, node_count=len(nodes)),
                self._log_path(group.member(index)),
                start,
            )
            for index in sorted(places)
        ]

    async def _follow(self, running: RunningGroup, members: Sequence[Process]) -> None:
        """Remove members that never join, and free the launcher's resources when all members have ended.

        The hub knows the end of a member that has joined. It knows nothing of the others.
        """
        over = asyncio.ensure_future(running.wait())
        await asyncio.wait({over}, timeout=JOIN_TIMEOUT_S)
        how = over.result() if over.done() else f"it has not joined the hub within {JOIN_TIMEOUT_S:g} s of its start"
        await asyncio.sleep(EXIT_REPORT_S)
        for process in members:
            if process.join is None:
                process.end_reason = process.end_reason or f"never joined: {how}"
                self._hub.remove(process, ProcessEnd(None, how))
        await asyncio.wait([asyncio.shield(process.ended) for process in members])
        await running.end()
        await over
        self._running.pop(running, None)

    async def _restart(self, process: Process, pause_s: float) -> None:
        """Start a member again: where it was, or on another node if that one is gone."""
        await asyncio.sleep(pause_s)
        group, index = process.group, process.index
        try:
            nodes = await self._nodes()
            place = process.place
            if place.node not in [node.name for node in nodes]:
                place = self._place(group, [index], nodes)[process.key]
            with self._reserving({process.key: place}) as places:
                await self._launch(group, places)
        except RunError as error:
            self._log(f"{process.name} cannot be started again for now: {error.message}")
            self._start_task(self._start_when_there_is_room(group, [index]), f"room for {process.name}")

    async def _start_when_there_is_room(self, group: ProcessGroup, indices: Sequence[int] | None = None) -> None:
        """Start members of a group, by default all, as soon as there is room. Log each new reason why there is not."""
        problem = ""
        async for _ in polls_async(ROOM_POLL_S):
            try:
                if isinstance(self._launcher, RequestsRoom) and not await self._launcher.request(group):
                    continue
                nodes = await self._nodes()
                with self._reserving(self._place(group, indices or range(group.count), nodes)) as places:
                    self._groups[group.name] = group
                    await self._launch(group, places)
                return
            except RunError as error:
                if error.message != problem:
                    problem = error.message
                    self._log(f"{group.name} waits for room: {problem}")

    def _place(self, group: ProcessGroup, indices: Sequence[int], nodes: Sequence[Node]) -> Places:
        """Place some members of a group, beside those of its members that run."""
        places = place_groups([group], nodes, self._taken(), self._sharing())
        return {(group.name, index): places[group.name, index] for index in indices}

    @contextmanager
    def _reserving(self, places: Places) -> Iterator[Places]:
        """Let places count as taken inside the block, in which their members are started."""
        self._reserved |= places
        try:
            yield places
        finally:
            for key in places:
                self._reserved.pop(key, None)

    async def _nodes(self) -> list[Node]:
        """Return the launcher's nodes, the avoided ones last."""
        nodes = await self._launcher.nodes([*self._groups.values()])
        return sorted(nodes, key=lambda node: node.name in self._lost_nodes)

    def _taken(self) -> Places:
        """Return the places of members that run or are about to be started."""
        return self._reserved | {process.key: process.place for process in self._hub.processes.values()}

    def _sharing(self) -> set[str]:
        """Return the names of the groups that share their GPUs with others, including those of earlier attempts."""
        return {group.name for group in self._groups.values() if group.shares_gpus}

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work that `end` cancels."""
        task = start_task(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def variables_of(group: ProcessGroup, index: int, places: Mapping[int, Place], *, node_count: int) -> dict[str, str]:
    """Return the environment variables of a member.

    Args:
        group: its group.
        index: its number in the group.
        places: of all members that are started with it, by index.
        node_count: number of nodes of the run.
    """
    variables: dict[str, str] = {}
    if group.cores_each:
        variables["OMP_NUM_THREADS"] = str(group.cores_each)
    if node_count > 1:
        variables[NODES_VARIABLE] = str(node_count)
    if group.has_ranks:
        # Libraries take LOCAL_RANK for the number of their GPU. A rank with a GPU of its own sees only that one.
        node = places[index].node
        without_gpus = [i for i, place in places.items() if i < index and place.node == node and not place.gpus]
        variables["RANK"] = str(index)
        variables["LOCAL_RANK"] = str(len(without_gpus))
        variables["WORLD_SIZE"] = str(group.count)
    return variables | dict(group.environment)
