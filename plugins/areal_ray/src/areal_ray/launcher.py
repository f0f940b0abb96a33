"""Launcher for a Ray cluster: a placement group holds the run's GPUs, and an actor in it starts each member.

Ray places the bundles, starts machines if it can, and shows the run's processes by name. It does not monitor them:
members send heartbeats to the driver's hub, and exit when it closes the connection.
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
from areal_ray.cluster import Bundle, bundles_for, check_bundles, connect, describe_cluster, request_bundles, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.launchers import Place, ProcessGroup
    from areal_ray.config import RaySettings

CONNECT_TIMEOUT_S = 300.0
"""Seconds to connect to Ray, which may have to start: that takes 40 s on a busy machine."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds that a call of Ray may take."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that disconnecting from Ray may take."""
PROGRESS_S = 10.0
"""Seconds between log lines while the run waits for bundles."""
POLL_S = 0.1
"""Seconds between two checks of the bundles."""
END_TIMEOUT_S = 2.0
"""Seconds that actors may take to kill their members. The actor of a lost node does not answer."""
NO_ROOM = "request less, add nodes, or wait longer: launcher.placement_timeout_s; see `ray status` for what is in use"


class RayLauncher:
    """A `Launcher` for a Ray cluster. This process is a Ray driver for as long as the run lasts.

    A member sees all GPUs of the run on its node, and chooses its own among them. Its actor has none: the placement
    group holds them.
    """

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        # Ray's own programs die with the thread that started them, and in the main thread Ray sets signal handlers.
        self._thread = LoopThread("Ray")
        self._numbers = itertools.count(1)
        self._placement_groups: list[PlacementGroup] = []
        self._required: set[str] = set()
        self._requested: dict[str, PlacementGroup] = {}
        self._bundles: list[Bundle] = []

    @cached_property
    def host(self) -> str:
        """Address of this machine in the cluster. The first access connects to Ray.

        Raises:
            RunError: Ray cannot be reached.
        """
        return str(asyncio.run(self._call(connect, self._settings, limit_s=CONNECT_TIMEOUT_S)))

    async def _call(self, function: Callable[..., Any], *arguments: Any, limit_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Call a function of Ray in Ray's thread.

        Raises:
            RunError: it does not answer in time, or fails.
        """

        async def call() -> Any:
            if not ray.is_initialized() and function is not connect:  # the call would start Ray again
                raise RunError("this program has disconnected from Ray")
            return function(*arguments)

        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.start(call())), limit_s)
        except TimeoutError:
            raise RunError(f"Ray did not answer within {limit_s:g} s") from None
        except (ray.exceptions.RayError, ValueError) as error:
            raise RunError(f"a call of Ray failed: {error}") from error

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        """Return the nodes on which the run has bundles, once all are placed and their nodes answer.

        There is one placement group for all groups. It is replaced if there are new groups, for example when the
        process that prepares the model is followed by the others. See `Launcher.nodes`.

        Raises:
            RunError: it took too long; the message has the cluster's resources.
        """
        required = [group for group in groups if group.name not in self._requested]
        required_names = {group.name for group in required}
        if not required_names <= self._required:
            for placement_group in self._placement_groups:
                await self._call(remove_placement_group, placement_group)
            sizes = bundles_for(required, self._settings.nodes)
            self._placement_groups = [await self._call(request_bundles, self._settings, sizes)]
            self._required = required_names
        probes: dict[Any, tuple[str, Any]] = {}
        began_at = logged_at = time.monotonic()
        while True:
            placement_groups = [*self._placement_groups, *self._requested.values()]
            bundles, missing = await self._call(check_bundles, placement_groups, probes)
            if not missing:
                break
            now = time.monotonic()
            missing_text = " and ".join(f"{count} x {description}" for description, count in Counter(missing).items())
            if now - began_at > self._settings.placement_timeout_s:
                available = await self._call(describe_cluster)
                waited_s = now - began_at
                message = f"the Ray cluster has had no room for {missing_text} for {waited_s:.0f} s; it has {available}"
                raise RunError(message, hints=[NO_ROOM])
            if now - logged_at > PROGRESS_S:
                logged_at = now
                print_error(f"waiting for room in the Ray cluster for {missing_text}, since {now - began_at:.0f} s")
            await asyncio.sleep(POLL_S)
        # Running members know GPUs by their position on the node, so new bundles are appended.
        kept = [bundle for bundle in self._bundles if bundle in bundles]
        self._bundles = [*kept, *(bundle for bundle in bundles if bundle not in self._bundles)]
        nodes = dict.fromkeys((bundle.node, bundle.address) for bundle in self._bundles)
        return [Node(name, address, len(self._gpus(name))) for name, address in nodes]

    def _gpus(self, node: str) -> list[str]:
        """Return the run's GPUs on a node, in the order in which members number them."""
        return [gpu for bundle in self._bundles if bundle.node == node for gpu in bundle.gpus]

    async def request(self, group: ProcessGroup) -> bool:
        """Request bundles for a group; see `RequestsRoom.request`. The cluster's autoscaler sees the request, too.

        The run keeps them: `nodes` counts them when they are there, and Ray places them again if their node is lost.
        """
        if group.name not in self._required | self._requested.keys():
            self._requested[group.name] = await self._call(request_bundles, self._settings, bundles_for([group], None))
        table = await self._call(placement_group_table, self._requested.get(group.name) or self._placement_groups[0])
        return bool(table["state"] == "CREATED")

    async def start(self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]) -> RayGroup:
        """Start an actor for each member; see `Launcher.start`."""
        running = RayGroup(self._call)
        variables = {**self._settings.runtime_env.get("env_vars", {}), **self._settings.passed(os.environ)}
        variables |= {**environment, **group.environment}
        run = run_name(environment)
        for index, place in places.items():
            member = group.member(index)
            bundle = next((candidate for candidate in self._bundles if candidate.node == place.node), None)
            if bundle is None:
                raise RunError(f"{member} cannot be started: the run has no bundle on {place.node}")
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus(place.node))}
            arguments = (
                [*group.command],
                {**variables, **member_environment(group, {index: place}), **gpus},
                str(Path.cwd()),
            )
            name = f"areal/{run}/{next(self._numbers)}-{member}"  # numbered: a predecessor may not have freed its name
            running.members[member] = await self._call(start, bundle, name, *arguments)
        return running

    async def close(self) -> None:
        """Disconnect from Ray, which ends the actors; members exit when the hub is gone. See `Launcher.close`."""
        try:
            if ray.is_initialized():
                await self._call(ray.shutdown, limit_s=SHUTDOWN_TIMEOUT_S)
        except RunError as error:
            atexit.unregister(ray.shutdown)
            print_error(f"{error.message}; Ray ends what is left when it notices that this program is gone")


class RayGroup:
    """The members of a group; see `RunningGroup`.

    Args:
        call: calls a function of Ray.

    Attributes:
        members: actor and pending outcome of each member, by name.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.members: dict[str, tuple[Any, Any]] = {}

    async def wait(self) -> str:
        """Wait until all members have ended; return how. See `RunningGroup.wait`."""
        ends = await asyncio.gather(*(ended for _, ended in self.members.values()), return_exceptions=True)
        return "\n".join(f"{name} {end}" for name, end in zip(self.members, ends, strict=True))

    async def end(self) -> None:
        """Kill the members; see `RunningGroup.end`."""
        actors = [actor for actor, _ in self.members.values()]
        with suppress(RunError):
            ends = await self._call(lambda: [actor.end.remote() for actor in actors])
            await asyncio.wait({asyncio.gather(*ends, return_exceptions=True)}, timeout=END_TIMEOUT_S)
            await self._call(lambda: [ray.kill(actor) for actor in actors])
