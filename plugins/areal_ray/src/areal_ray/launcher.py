"""Runs on a Ray cluster: a placement group holds the run's GPUs, and an actor in it starts each member.

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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from areal_core.errors import RunError
from areal_core.launchers import Node, member_environment, run_name
from areal_core.processes import LoopThread
from areal_core.programs import print_error
from areal_ray.cluster import Held, ask_for, bundles_for, connect, look, start, what_there_is

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.launchers import Place, ProcessGroup
    from areal_ray.config import RaySettings

# For Ray; a cluster of this machine alone is started in the first, which takes 40 s on a busy one.
CONNECT_S, ANSWER_S, SHUTDOWN_S = 300.0, 60.0, 20.0
PROGRESS_S, POLL_S = 10.0, 0.1
END_S = 2.0  # for an actor to kill its member; a node that is lost does not answer
NO_ROOM = "ask for less, add nodes, or wait longer for them: launcher.placement_timeout_s; who has what: ray status"


class RayLauncher:
    """A `Launcher` for a Ray cluster; this process is Ray's driver as long as the run goes on.

    A member is shown all GPUs that the run has on its node, and narrows them to its own. Its actor has none: the
    placement group holds them, whoever uses them.
    """

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        # Ray's own programs die with the thread that starts them, and in the main thread it sets signal handlers.
        self._thread = LoopThread("Ray")
        self._numbers = itertools.count(1)
        self._rooms: list[PlacementGroup] = []
        self._required: set[str] = set()
        self._more: dict[str, PlacementGroup] = {}
        self._held: list[Held] = []

    @cached_property
    def host(self) -> str:
        """This machine's address in the cluster; asks Ray at the first time.

        Raises:
            RunError: Ray cannot be reached.
        """
        return str(asyncio.run(self._ask(connect, self._settings, limit_s=CONNECT_S)))

    async def _ask(self, function: Callable[..., Any], *words: Any, limit_s: float = ANSWER_S) -> Any:
        """Call something of Ray in its thread.

        Raises:
            RunError: it does not answer, or refuses.
        """

        async def call() -> Any:
            if not ray.is_initialized() and function is not connect:  # it would start again by itself
                raise RunError("this program has left Ray")
            return function(*words)

        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.start(call())), limit_s)
        except TimeoutError:
            raise RunError(f"Ray has not answered within {limit_s:g} s") from None
        except (ray.exceptions.RayError, ValueError) as error:
            raise RunError(f"Ray has refused: {error}") from error

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """See `Launcher.nodes`: where the run has bundles, once all have been placed and their nodes answer.

        There is one placement group, for all groups that are named; it is replaced when new ones are, as when the
        process that makes the model is followed by the others.

        Raises:
            RunError: it has taken too long; says what there is.
        """
        required = [group for group in groups if group.name not in self._more]
        if not (names := {group.name for group in required}) <= self._required:
            for former in self._rooms:
                await self._ask(remove_placement_group, former)
            self._rooms = [await self._ask(ask_for, self._settings, bundles_for(required, self._settings.nodes))]
            self._required = names
        asked: dict[Any, tuple[str, Any]] = {}
        began = told = time.monotonic()
        while True:
            held, missing = await self._ask(look, [*self._rooms, *self._more.values()], asked)
            if not missing:
                break
            now = time.monotonic()
            what = " and ".join(f"{count} x {one}" for one, count in Counter(missing).items())
            if now - began > self._settings.placement_timeout_s:
                there = await self._ask(what_there_is)
                problem = f"the Ray cluster has had no room for {what} for {now - began:.0f} s; it has {there}"
                raise RunError(problem, hints=[NO_ROOM])
            if now - told > PROGRESS_S:
                told = now
                print_error(f"waiting since {now - began:.0f} s for room in the Ray cluster for {what}")
            await asyncio.sleep(POLL_S)
        # Members that run know GPUs by their numbers: what is new on a node comes last.
        self._held = [*(one for one in self._held if one in held), *(one for one in held if one not in self._held)]
        nodes = dict.fromkeys((one.node, one.address) for one in self._held)
        return [Node(name, address, len(self._gpus(name))) for name, address in nodes]

    def _gpus(self, node: str) -> list[str]:
        """The run's GPUs of a node, in the order of their numbers."""
        return [gpu for one in self._held if one.node == node for gpu in one.gpus]

    async def request(self, group: ProcessGroup) -> bool:
        """See `RequestsRoom.request`; the room is asked of the cluster, and so of its autoscaler.

        It stays the run's: `nodes` counts it whenever it is there, and Ray places it anew where its node is lost.
        """
        if group.name not in self._required | self._more.keys():
            self._more[group.name] = await self._ask(ask_for, self._settings, bundles_for([group], None))
        room = await self._ask(placement_group_table, self._more.get(group.name) or self._rooms[0])
        return bool(room["state"] == "CREATED")

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> RayGroup:
        """See `Launcher.start`: an actor for each member."""
        running = RayGroup(self._ask)
        own = {**self._settings.runtime_env.get("env_vars", {}), **self._settings.passed(os.environ)}
        own |= {**environment, **group.environment}
        run = run_name(environment)
        for index, place in places.items():
            member, here = group.member(index), next((one for one in self._held if one.node == place.node), None)
            if here is None:
                raise RunError(f"{member} cannot be started: the run has nothing on {place.node}")
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus(place.node))}
            words = [*group.command], {**own, **member_environment(group, {index: place}), **shown}, str(Path.cwd())
            name = f"areal/{run}/{next(self._numbers)}-{member}"  # a former one's may not be free yet
            running.members[member] = await self._ask(start, here, name, *words)
        return running

    async def close(self) -> None:
        """See `Launcher.close`: actors end with this program's part in Ray, and members when the hub is gone."""
        try:
            if ray.is_initialized():
                await self._ask(ray.shutdown, limit_s=SHUTDOWN_S)
        except RunError as error:
            atexit.unregister(ray.shutdown)
            print_error(f"{error.message}: it ends what is left when it sees this program gone")


class RayGroup:
    """See `RunningGroup`.

    Args:
        ask: calls something of Ray.

    Attributes:
        members: by name, the actor of each, and how it ends.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self.members: dict[str, tuple[Any, Any]] = {}

    async def wait(self) -> str:
        """See `RunningGroup.wait`."""
        ends = await asyncio.gather(*(ended for _, ended in self.members.values()), return_exceptions=True)
        return "\n".join(f"{name} {end}" for name, end in zip(self.members, ends, strict=True))

    async def end(self) -> None:
        """See `RunningGroup.end`."""
        actors = [actor for actor, _ in self.members.values()]
        with suppress(RunError):
            ends = await self._ask(lambda: [actor.end.remote() for actor in actors])
            await asyncio.wait({asyncio.gather(*ends, return_exceptions=True)}, timeout=END_S)
            await self._ask(lambda: [ray.kill(actor) for actor in actors])
