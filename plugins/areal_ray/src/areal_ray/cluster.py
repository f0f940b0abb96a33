"""What is asked of Ray. Every function may block: the launcher calls them in a thread of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_core.errors import RunError
from areal_ray.actor import Member

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from areal_core.interfaces.launcher import ProcessGroup
    from areal_ray.config import RaySettings

OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""In a cluster that this program starts: nobody is told, and processes have their full share of the machine."""
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: a run moves nothing through it."""
REACH_S = 10.0
SIGACTION_BYTES = 256


Held = tuple[str, list[str], int]
"""By one bundle: Ray's number of a node, the GPUs there, as `CUDA_VISIBLE_DEVICES` names them, and the cores it has."""


@dataclass(eq=False)
class Room:
    """A placement group of the run.

    Attributes:
        group: as Ray knows it.
        bundles: that were asked for.
        name: of the process group that it was requested for; empty for the whole run's.
        held: by number of the bundle, where its node answers.
    """

    group: PlacementGroup
    bundles: Sequence[Mapping[str, float]]
    name: str
    held: dict[int, Held] = field(default_factory=dict)

    def gpus(self, bundle: int) -> int:
        """Of one bundle."""
        return int(self.bundles[bundle].get("GPU", 0))

    def is_there(self) -> bool:
        """Whether the cluster has made room for all bundles."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def look(self, nodes: Collection[str]) -> dict[Any, tuple[int, str]]:
        """Ask some nodes what the run has there: the answers to come, each with its bundle and node."""
        where = placement_group_table(self.group)["bundles_to_node_id"].items()
        task = ray.remote(num_cpus=0)(_look)
        return {
            task.options(num_gpus=self.gpus(bundle), scheduling_strategy=self._at(bundle)).remote(): (bundle, node)
            for bundle, node in sorted(where)
            if node in nodes
        }

    def start(self, bundle: int, name: str, *words: Any) -> tuple[Any, Any]:
        """Have an actor start a member: the actor, and how the member ends."""
        options = {"name": name, "num_cpus": 0, "max_restarts": 0, "max_concurrency": 2}
        actor: Any = ray.remote(Member).options(**options, scheduling_strategy=self._at(bundle)).remote()
        return actor, actor.run.remote(*words)

    def remove(self) -> None:
        """Give it back; what runs there ends."""
        remove_placement_group(self.group)

    def _at(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)


def _look() -> tuple[list[str], int]:
    """What a task finds: the GPUs that Ray has given it, by their names on its node, and the node's cores."""
    return ray.get_runtime_context().get_accelerator_ids()["GPU"], os.cpu_count() or 0


def connect(settings: RaySettings) -> str:
    """Become a driver of the cluster; the address of this machine in it.

    Raises:
        RunError: there is none, or it does not answer.
    """
    address, host = settings.address, settings.host
    more: dict[str, Any] = {"runtime_env": settings.runtime_env or None, "log_to_driver": False, "logging_level": 40}
    if address is None:
        os.environ.update({name: os.environ.get(name, value) for name, value in OWN_CLUSTER.items()})
        host = host or "127.0.0.1"
        more |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address or ""
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        if ":" in known:  # Ray itself waits a minute for nobody, and ends this program
            name, _, port = known.rpartition(":")
            socket.create_connection((name.strip("[]"), int(port)), REACH_S).close()
        ray.init(address=address or "local", _node_ip_address=host, **more)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "cannot be started on this machine" if address is None else f"at {address} cannot be reached"
        hints = ["start one with: ray start --head", "or have one of this machine alone: launcher.address=null"]
        raise RunError(f"the Ray cluster {where}: {error}", hints=hints if address else ()) from error
    finally:  # Ray has set a handler below Python's, which ends this program at the second signal
        libc.sigaction(signal.SIGTERM, action, None)
    # Whatever `log_to_driver` says, Ray prints the logs of nodes that it has lost.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return host or ray.util.get_node_ip_address()


def bundles_for(groups: Sequence[ProcessGroup], nodes: int | None) -> list[int]:
    """The GPUs of each bundle that groups need: one for each member, or one a machine where `nodes` says how many.

    Those that are used in turns are counted once, in the larger parts: servers' rather than ranks'.
    """
    sides: dict[str, list[int]] = {"": []}
    for group in groups:
        sides.setdefault(group.role if group.shares_gpus else "", []).extend([group.gpus_each] * group.count)
    own = sides.pop("") + max(sides.values(), key=lambda sizes: (sum(sizes), max(sizes)), default=[])
    own = [gpus for gpus in own if gpus]
    return [-(-sum(own) // (nodes or 1))] * (nodes or 1) if nodes or not own else own


def ask_for(settings: RaySettings, sizes: Sequence[int], avoided: Iterable[str], name: str = "") -> Room:
    """Ask for bundles with some GPUs each, away from some nodes; Ray makes the room when it can."""
    bundles = [{"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {}), **settings.resources} for gpus in sizes]
    away = f"!in({','.join(sorted(avoided))})"
    selector = {**settings.labels, **({} if away == "!in()" else {"ray.io/node-id": away})}
    strategy = "STRICT_SPREAD" if settings.nodes or not any(sizes) else settings.strategy
    more = {"bundle_label_selector": [selector] * len(bundles)} if selector else {}
    return Room(placement_group(bundles, strategy, **more), bundles, name)


def read_nodes() -> dict[str, Mapping[str, Any]]:
    """Those that Ray believes alive, by its number of each."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def what_there_is() -> str:
    """The cluster in words: what each node has, and what is free in all."""

    def amounts(resources: Mapping[str, float]) -> str:
        shown = (name for name in sorted(resources) if not any(own in name for own in ("node:", "_group_", "memory")))
        return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "nothing"

    nodes = sorted((str(node["NodeName"]), amounts(node["Resources"])) for node in read_nodes().values())
    return f"{'; '.join(map(': '.join, nodes))}; free in all: {amounts(ray.available_resources())}"
