"""Members on a Ray cluster: a placement group holds the run's GPUs, and an actor in it starts each member.

Ray finds room, has machines started where it can, and shows the run's processes by name. It watches none of them:
members tell the driver's hub that they live, and end by themselves when it hangs up.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from areal_core.background import start_task
from areal_core.cli.output import complain
from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node
from areal_core.launchers import member_environment
from areal_core.launchers.member import LOGS_VARIABLE
from areal_core.messages import LoopThread
from areal_ray.cluster import Room, ask_for, bundles_for, connect, read_nodes, what_there_is

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.interfaces.launcher import Place, ProcessGroup
    from areal_ray.config import RaySettings

CONNECT_S, ANSWER_S, SHUTDOWN_S = 300.0, 60.0, 20.0
"""For Ray; a cluster of this machine alone is started in the first, which takes 40 s on a busy one."""
PROBE_S, PROGRESS_S, POLL_S = 3.0, 10.0, 0.1
END_S = 2.0
"""For an actor to kill its member; a node that is lost does not answer."""
NO_ROOM = (
    "ask for less, or add nodes; others' runs may hold what is missing: ray status",
    "where machines are started when they are asked for, raise launcher.placement_timeout_s",
)


class RayLauncher:
    """A `Launcher` for a Ray cluster; this process is Ray's driver as long as the run goes on.

    A member is shown all GPUs that the run has on its node, and narrows them to its own. Its actor has none: the
    placement group holds them, whoever uses them in turns.
    """

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        # Ray's own programs die with the thread that starts them, and in the main thread it sets signal handlers.
        self._thread = LoopThread("Ray")
        self._host, self._numbers, self._lock = "", itertools.count(1), asyncio.Lock()
        self._rooms: list[Room] = []
        self._groups: list[RayGroup] = []
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._lost: set[str] = set()
        self._bundles: dict[str, tuple[Room, int]] = {}
        self._gpus: dict[str, list[str]] = {}

    @property
    def host(self) -> str:
        """This machine's address in the cluster; asks Ray at the first time.

        Raises:
            RunError: Ray cannot be reached.
        """
        if not self._host:
            self._host = self._thread.start(_call(connect, self._settings)).result(CONNECT_S)
        return self._host

    async def _ask(self, function: Callable[..., Any], *words: Any, limit_s: float = ANSWER_S) -> Any:
        """Call something of Ray in its thread.

        Raises:
            RunError: it does not answer, or refuses.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(self._thread.start(_call(function, *words)))
        except TimeoutError:
            raise RunError(f"Ray has not answered within {limit_s:g} s") from None
        except (ray.exceptions.RayError, ValueError) as error:
            raise RunError(f"Ray has refused: {error}") from error

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: where the run has bundles, once they are enough for these groups."""
        async with self._lock:
            needed = Counter(bundles_for(groups, self._settings.nodes))
            while True:
                await self._look_around()
                if not any(group.is_running for group in self._groups):  # otherwise GPUs must keep their numbers
                    self._gpus.clear()
                    for room in [*self._rooms]:
                        is_needless = any(needed) and not room.gpus(0) and not room.name
                        if len(room.held) < len(room.bundles) or is_needless:
                            self._rooms.remove(room)
                            await self._ask(room.remove)
                held = Counter(room.gpus(bundle) for room in self._rooms for bundle in room.held)
                if not (missing := needed - held) or (not any(needed) and held.total() >= needed.total()):
                    return self._held_nodes()
                await self._make_room([*missing.elements()])

    async def request(self, group: ProcessGroup) -> bool:
        """Ask the cluster, and so its autoscaler, for room for one more group; returns at once.

        Ask again until there is room. Then `nodes` counts its GPUs, and goes on counting them: the room stays the
        run's. Where its node is lost, Ray looks for another one by itself.

        Args:
            group: under whose name the room is asked for again.

        Returns:
            Whether the cluster has room for it now.
        """
        async with self._lock:
            room = next((room for room in self._rooms if room.name == group.name), None)
            if room is None:
                sizes = bundles_for([group], None)
                self._rooms.append(room := await self._ask(ask_for, self._settings, sizes, self._lost, group.name))
            return bool(await self._ask(room.is_there))

    async def _look_around(self) -> None:
        """Find out which nodes answer, and what the run has there. Ray learns of a lost node a quarter minute late."""
        self._nodes = await self._ask(read_nodes)
        answers = dict(zip(self._nodes, await asyncio.gather(*map(_answers, self._nodes.values())), strict=True))
        for node, facts in [*self._nodes.items()]:
            names = {facts["NodeName"], facts["NodeManagerHostname"], facts["NodeManagerAddress"]}
            if node in self._lost or not answers[node] or names & {*self._settings.excluded_nodes}:
                self._leave_out(node, is_told=answers[node])
        for room in self._rooms:
            asked = await self._ask(room.look, self._nodes)
            waiting = {asyncio.ensure_future(answer): where for answer, where in asked.items()}
            if waiting:
                await asyncio.wait(waiting, timeout=ANSWER_S)
            room.held.clear()
            for answer, (bundle, node) in waiting.items():
                if answer.done() and answer.exception() is None:
                    room.held[bundle] = (node, *answer.result())
                elif not answer.cancel() and node in self._nodes:
                    self._leave_out(node)

    def _leave_out(self, node: str, is_told: bool = False) -> None:
        facts = self._nodes.pop(node)
        if node not in self._lost and not is_told:
            complain(f"the node {facts['NodeName']} is left out: Ray counts on it, but it does not answer")
        self._lost.add(node)

    async def _make_room(self, sizes: list[int]) -> None:
        """Wait until the cluster has room for bundles with so many GPUs each.

        Raises:
            RunError: it has had none; says what there is.
        """
        settings, began, told = self._settings, time.monotonic(), 0.0
        held = {node for room in self._rooms for node, *_ in room.held.values()} if settings.nodes else set()
        self._rooms.append(asked := await self._ask(ask_for, settings, sizes, self._lost | held))
        what = " and ".join(f"{count} x {one}" for one, count in Counter(map(str, asked.bundles)).items())
        while not await self._ask(asked.is_there):
            waited_s = time.monotonic() - began
            if waited_s > settings.placement_timeout_s:
                there = await self._ask(what_there_is)
                raise RunError(
                    f"the Ray cluster has had no room for {what} for {waited_s:.0f} s; it has {there}", hints=NO_ROOM
                )
            if waited_s > told + PROGRESS_S:
                told = waited_s
                complain(f"waiting for room in the Ray cluster for {what}, {waited_s:.0f} s")
            await asyncio.sleep(POLL_S)

    def _held_nodes(self) -> list[Node]:
        """Those on which the run has something, in the order of its bundles."""
        often, found = Counter(facts["NodeName"] for facts in self._nodes.values()), dict[str, Node]()
        self._bundles.clear()
        for room in self._rooms:
            for bundle, (node, own, _cores) in room.held.items():
                facts = self._nodes[node]
                name = facts["NodeName"] + (f" ({node[:6]})" if often[facts["NodeName"]] > 1 else "")
                gpus = self._gpus.setdefault(name, [])
                gpus += [gpu for gpu in own if gpu not in gpus]
                self._bundles.setdefault(name, (room, bundle))
                found[name] = Node(name, facts["NodeManagerAddress"], len(gpus))
        return [*found.values()]

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> RayGroup:
        """See `Launcher.start`: an actor for each member."""
        running = RayGroup(self._ask)
        self._groups = [*(former for former in self._groups if former.is_running), running]
        own = {**self._settings.runtime_env.get("env_vars", {}), **self._settings.passed(os.environ)}
        own |= {**environment, **group.environment}
        run = Path(environment.get(LOGS_VARIABLE, "run/logs")).parent.name
        for index, place in places.items():
            if place.node not in self._bundles:
                raise RunError(f"{group.member(index)} cannot be started: the run has nothing on {place.node}")
            room, bundle = self._bundles[place.node]
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[place.node])}
            words = [*group.command], {**own, **member_environment(group, {index: place}), **shown}, str(Path.cwd())
            name = f"areal/{run}/{next(self._numbers)}-{group.member(index)}"  # a former one's may not be free yet
            running.add(group.member(index), *await self._ask(room.start, bundle, name, *words))
        return running

    async def close(self) -> None:
        """See `Launcher.close`."""
        if not self._host:
            return
        self._host = ""
        await asyncio.gather(*(group.end() for group in self._groups))
        try:
            for room in self._rooms:
                await self._ask(room.remove, limit_s=SHUTDOWN_S)
            await self._ask(ray.shutdown, limit_s=SHUTDOWN_S)
        except RunError as error:
            atexit.unregister(ray.shutdown)
            complain(f"{error.message}: it ends what is left when it sees this program gone")
        self._rooms.clear()


class RayGroup:
    """See `RunningGroup`.

    Args:
        ask: calls something of Ray.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self._members: dict[Any, asyncio.Task[str]] = {}
        self._has_ended = False

    @property
    def is_running(self) -> bool:
        """Whether members may be there."""
        return not self._has_ended and not all(over.done() for over in self._members.values())

    def add(self, name: str, actor: Any, ended: Any) -> None:
        """A member was started."""
        self._members[actor] = start_task(_watch(name, ended), f"actor of {name}")

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        return "\n".join([await asyncio.shield(over) for over in self._members.values()])

    async def end(self, grace_s: float = 0.0) -> None:
        """See `RunningGroup.end`."""
        if self._has_ended or not self._members:
            return
        _, left = await asyncio.wait(self._members.values(), timeout=grace_s)
        with suppress(RunError, TimeoutError):
            async with asyncio.timeout(END_S):
                asked = [actor for actor, over in self._members.items() if over in left]
                answers = await self._ask(lambda: [actor.end.remote() for actor in asked])
                await asyncio.gather(*answers, return_exceptions=True)
                await asyncio.gather(*map(asyncio.shield, left))
        self._has_ended = True
        with suppress(RunError):
            await self._ask(lambda: [ray.kill(actor) for actor in self._members])


async def _call(function: Callable[..., Any], *words: Any) -> Any:
    return function(*words)


async def _answers(node: Mapping[str, Any]) -> bool:
    """Whether there is somebody at a node's address."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S):
            (await asyncio.open_connection(node["NodeManagerAddress"], node["NodeManagerPort"]))[1].close()
            return True
    return False


async def _watch(name: str, ended: Any) -> str:
    """How a member has ended, in words."""
    try:
        return f"{name} {await ended}"
    except ray.exceptions.RayError as error:
        return f"{name} is lost with its actor: {str(error).strip().splitlines()[0]}"
