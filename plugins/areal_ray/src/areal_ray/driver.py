"""Speaks with Ray for a launcher: `python -m areal_ray.driver`, a line of JSON for each order and each answer.

Standard input gives the settings, then what to run on each node; when it ends, the launcher is gone or has had enough,
and so are the nodes. Signals end nothing here: the supervisor decides what they mean. Standard output tells `host`,
`nodes`, `lost`, `said` and `failed`. Ray itself writes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_core.background import start_thread
from areal_core.errors import RunError
from areal_core.interfaces.launcher import NODE_VARIABLE, UNTIL_INPUT_ENDS
from areal_ray.actor import WardenActor
from areal_ray.config import RaySettings

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: a run moves nothing through it."""
OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""In a cluster that this program starts: nobody is told, and processes have their full share of the machine."""
NO_ROOM = (
    "ask for less, or add nodes; others' runs may hold what is missing: ray status",
    "where machines are started when they are asked for, raise launcher.placement_timeout_s",
)
REACH_S = 10.0
PROGRESS_S = 10.0
POLL_S = 0.2
GRACE_S = 10.0
ANSWER_S = 20.0
"""For actors to say that all is ended, beyond their own limits."""
GONE_S = 50.0
"""After the launcher is gone: a driver that Ray holds up longer ends at once, and Ray ends what it had."""


class Orders:
    """What the launcher says, a line each; None and `are_over` when it has ended."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.are_over = threading.Event()
        start_thread(self._read, "orders of the launcher")

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(json.loads(line))
        self.are_over.set()
        self._queue.put(None)
        time.sleep(GONE_S)
        os._exit(1)

    def next(self) -> Any:
        """Wait for the next one."""
        return self._queue.get()


class Cluster:
    """The nodes of one run in a Ray cluster.

    Args:
        settings: of the launcher.
        orders: of the launcher; when they are over, nothing is waited for any more.
        told: file descriptor for answers.
    """

    def __init__(self, settings: RaySettings, orders: Orders, told: int) -> None:
        self._settings = settings
        self._orders = orders
        self._answers = os.fdopen(told, "w")
        self._group: PlacementGroup | None = None
        self._actors: dict[str, Any] = {}
        self._holding: dict[Any, str] = {}
        self._ids: dict[str, str] = {}
        self._asked: dict[str, Any] = {}
        self._coming: tuple[Any, Any] | None = None
        self.host = ""

    def tell(self, **facts: Any) -> None:
        """Answer the launcher; one that is gone hears nothing."""
        try:
            self._answers.write(f"{json.dumps(facts)}\n")
            self._answers.flush()
        except OSError:
            pass

    def connect(self) -> None:
        """Become a driver of the cluster.

        Raises:
            RunError: there is none, or it does not answer.
        """
        address, host = self._settings.address, self._settings.host
        more: dict[str, Any] = {}
        if address is None:
            os.environ.update({name: os.environ.get(name, value) for name, value in OWN_CLUSTER.items()})
            host = host or LOOPBACK
            more = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            if self._settings.gpus_per_node == 0:
                more["num_gpus"] = 0
        known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address or ""
        try:
            if ":" in known:  # Ray itself waits a minute for nobody, and ends this program
                name, _, port = known.rpartition(":")
                socket.create_connection((name.strip("[]"), int(port)), REACH_S).close()
            ray.init(
                address="local" if address is None else address,
                _node_ip_address=host,
                runtime_env=self._settings.runtime_env or None,
                log_to_driver=False,
                **more,
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = "cannot be started on this machine" if address is None else f"at {address} cannot be reached"
            hints = ["start one with: ray start --head", "or have one of this machine alone: launcher.address=null"]
            raise RunError(f"the Ray cluster {where}: {error}", hints=hints if address else ()) from error
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # `ray job stop` sends it to all that it finds
            signal.signal(number, signal.SIG_IGN)
        self.host = host or ray.util.get_node_ip_address()

    def place(self) -> list[str]:
        """Wait for room; the nodes' names, a bundle each.

        Raises:
            RunError: there is none; says what there is.
        """
        count, limit = self._settings.nodes, self._settings.placement_timeout_s
        asked = {"CPU": self._settings.cpus_per_node, "GPU": self._settings.gpus_per_node}
        bundle = {name: float(number) for name, number in (asked | self._settings.resources).items() if number}
        selector = {**self._settings.labels, **self._exclusion()}
        self._group = placement_group(
            [bundle] * count,
            strategy=self._settings.strategy,
            bundle_label_selector=[selector] * count if selector else None,
        )
        began = told = time.monotonic()
        while not self._group.wait(1):
            now = time.monotonic()
            room = f"{count} nodes with {bundle} each ({self._settings.strategy})"
            if self._orders.are_over.is_set():
                raise RunError("the launcher has ended while it waited for room")
            if now - began > limit:
                raise RunError(
                    f"the Ray cluster has had no room for {room} for {limit:g} s; it has {_what_there_is()}",
                    hints=NO_ROOM,
                )
            if now - told > PROGRESS_S:
                told = now
                self.tell(said=[f"waiting for room in the Ray cluster for {room}: {now - began:.0f} of {limit:g} s"])
        bundles = placement_group_table(self._group)["bundles_to_node_id"]
        names = self._names(bundles)
        self._ids = {name: bundles[index] for index, name in enumerate(names)}
        return names

    def _exclusion(self, taken: Iterable[str] = ()) -> dict[str, str]:
        """The label selector that keeps excluded nodes out, and those that are taken."""
        found, unknown = list(taken), []
        for name in self._settings.excluded_nodes:
            ids = [node["NodeID"] for node in ray.nodes() if name in _names_of(node)]
            found += ids
            unknown += [] if ids else [name]
        if unknown:
            self.tell(said=[f"launcher.excluded_nodes names {', '.join(unknown)}: the Ray cluster has no such node"])
        return {"ray.io/node-id": f"!in({','.join(found)})"} if found else {}

    @staticmethod
    def _names(bundles: dict[int, str]) -> list[str]:
        """Ray's names of the nodes that have the bundles, numbered where one node has several."""
        named = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        names = [named[bundles[index]] for index in sorted(bundles)]
        seen, often = Counter[str](), Counter(names)
        numbered = []
        for name in names:
            numbered.append(f"{name}-{seen[name]}" if often[name] > 1 else name)
            seen[name] += 1
        return numbered

    def bring(self, command: list[str], environment: dict[str, str]) -> None:
        """Have an actor on each node start the command."""
        self._asked = {"command": command, "environment": environment}
        names = self.place()
        for index, name in enumerate(names):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            self._hold(name, self._actor(scheduling_strategy=strategy))
        self.tell(nodes=names)

    def _actor(self, **where: Any) -> Any:
        gpus, own = self._settings.gpus_per_node, self._settings.runtime_env.get("env_vars", {})
        actor = ray.remote(WardenActor).options(
            num_cpus=self._settings.cpus_per_node,
            num_gpus=gpus,
            resources=self._settings.resources,
            max_restarts=0,
            max_concurrency=2,
            **where,
        )
        return actor.remote(gpus > 0, own)

    def _hold(self, name: str, actor: Any) -> None:
        """Have an actor start the command."""
        self._actors[name] = actor
        variables = {**self._settings.passed(os.environ), **self._asked["environment"], NODE_VARIABLE: name}
        command = [*self._asked["command"], UNTIL_INPUT_ENDS]
        self._holding[actor.hold.remote(command, variables, os.getcwd())] = name  # noqa: PTH109

    def _take_more(self) -> None:
        """Ask for one more node where there may be one, and use it when it is there."""
        held = [self._ids[name] for name in self._holding.values()]
        if self._coming is None:
            if len(held) < self._settings.maximum_nodes:
                actor = self._actor(label_selector={**self._settings.labels, **self._exclusion(held)})
                self._coming = actor, actor.node_id.remote()
            return
        actor, asked = self._coming
        if not ray.wait([asked], timeout=0)[0]:
            return
        self._coming = None
        try:
            found = ray.get(asked)
        except ray.exceptions.RayError as error:
            self.tell(said=[f"a further node was lost before it came: {_first_line(error)}"])
            return
        (name,) = self._names({0: found})
        self._ids[name] = found
        self._hold(name, actor)

    def watch(self) -> None:
        """Tell which nodes are lost, until the launcher has had enough."""
        while not self._orders.are_over.wait(POLL_S):
            ended, _ = ray.wait(list(self._holding), timeout=0) if self._holding else ([], [])
            for held in ended:
                self.tell(lost={self._holding.pop(held): _why(held)})
            self._take_more()

    def end(self) -> None:
        """End all nodes, confirmed by their actors, and leave the cluster, or end it where it is this program's own."""
        held = set(self._holding.values())
        asked = {actor.end.remote(GRACE_S): name for name, actor in self._actors.items() if name in held}
        confirmed, silent = (
            ray.wait(list(asked), num_returns=len(asked), timeout=GRACE_S + ANSWER_S) if asked else ([], [])
        )
        for answer in silent:
            self.tell(said=[f"the node {asked[answer]} has not confirmed its end: it ends within the lease"])
        for answer in confirmed:
            try:
                if left := ray.get(answer):
                    self.tell(said=[f"processes of the run are still there on {asked[answer]}: {left}"])
            except ray.exceptions.RayError as error:
                self.tell(said=[f"the node {asked[answer]} has not confirmed its end: {_first_line(error)}"])
        for actor in [*self._actors.values(), *([self._coming[0]] if self._coming else [])]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def _why(held: Any) -> str:
    """Why a node is lost."""
    try:
        return str(ray.get(held))
    except ray.exceptions.RayTaskError as error:
        return f"its warden cannot be started: {error.cause!r}"
    except ray.exceptions.RayError as error:
        return f"its actor is gone: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _names_of(node: dict[str, Any]) -> set[str]:
    return {node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"]}


def _what_there_is() -> str:
    """The cluster in words: what each node has, and what is free in all."""
    nodes = [
        f"{node['NodeName']}: {_amounts(node['Resources'])}"
        for node in sorted(ray.nodes(), key=lambda node: str(node["NodeName"]))
        if node["Alive"]
    ]
    return f"{'; '.join(nodes)}; free in all: {_amounts(ray.available_resources()) or 'nothing'}"


def _amounts(resources: dict[str, float]) -> str:
    """Resources in words, without those that Ray makes up for itself."""
    shown = {
        name: number
        for name, number in sorted(resources.items())
        if not name.startswith("node:") and "_group_" not in name and "memory" not in name
    }
    return ", ".join(f"{number:g} {name}" for name, number in shown.items())


def main() -> None:
    """Do as standard input says."""
    told = os.dup(1)
    os.dup2(2, 1)  # what Ray writes there is no answer
    orders = Orders()
    cluster = Cluster(RaySettings.model_validate(orders.next()), orders, told)
    try:
        cluster.connect()
        cluster.tell(host=cluster.host)
        if (asked := orders.next()) is not None:
            cluster.bring(asked["command"], asked["environment"])
            cluster.watch()
    except RunError as error:
        cluster.tell(failed=error.message, hints=error.hints)
    finally:
        cluster.end()


if __name__ == "__main__":
    main()
