"""What is asked of Ray. Every function may block: the launcher calls them in a thread of its own."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_core.errors import RunError
from areal_ray.actor import Member

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers import ProcessGroup
    from areal_ray.config import RaySettings

# In a cluster that this program starts: nobody is told, and processes have their full share of the machine.
OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


class Held(NamedTuple):
    """What the run has in one bundle.

    Attributes:
        room: the placement group.
        bundle: its number there.
        node: the name of its node, with its address: Ray lets several have the same name.
        address: of that node.
        gpus: that Ray gives there, as `CUDA_VISIBLE_DEVICES` names them.
    """

    room: PlacementGroup
    bundle: int
    node: str
    address: str
    gpus: list[str]


def connect(settings: RaySettings) -> str:
    """Become a driver of the cluster; the address of this machine in it.

    Raises:
        RunError: there is none, or it does not answer.
    """
    address, host = settings.address or "local", settings.host
    if address == "local":
        os.environ.update({**OWN_CLUSTER, **os.environ})
        host = host or "127.0.0.1"
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    words = {"runtime_env": settings.runtime_env or None, "log_to_driver": False, "logging_level": 40}
    try:
        if ":" in known:  # Ray itself waits minutes for nobody, and ends this program
            name, _, port = known.rpartition(":")
            socket.create_connection((name.strip("[]"), int(port)), timeout=10.0).close()
        ray.init(address, _node_ip_address=host, include_dashboard=None if settings.address else False, **words)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        hints = ["start one with: ray start --head", "or have one of this machine alone: launcher.address=null"]
        raise RunError(f"the Ray cluster at {address} cannot be reached: {error}", hints=hints) from error
    # Whatever `log_to_driver` says, Ray prints the logs of nodes that it has lost.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return host or ray.util.get_node_ip_address()


def bundles_for(groups: Sequence[ProcessGroup], nodes: int | None) -> list[int]:
    """The GPUs of each bundle that groups need: one for each member, or one a machine where `nodes` says how many.

    Those that are shared are counted once, in the larger parts: servers' rather than ranks'. Those that the
    config names are of one machine, and may be named for several servers.
    """
    if not nodes and (named := {gpu for group in groups for gpu in group.gpus or ()}):
        return [len(named)]
    sides: dict[str, list[int]] = {"": []}
    are_shared = any(group.shares_gpus for group in groups)
    for group in groups:
        shares = group.shares_gpus or (are_shared and group.role == "trainer")
        sides.setdefault(group.role if shares else "", []).extend([group.gpus_each] * group.count)
    own = sides.pop("") + max(sides.values(), key=lambda sizes: (sum(sizes), max(sizes)), default=[])
    own = [gpus for gpus in own if gpus]
    return [-(-sum(own) // (nodes or 1))] * (nodes or 1) if nodes or not own else own


def ask_for(settings: RaySettings, sizes: Sequence[int]) -> PlacementGroup:
    """Ask for bundles with some GPUs each. Ray places them when it can, and those of a lost node anew."""
    bundles = [{"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {}), **settings.resources} for gpus in sizes]
    names, excluded = ("NodeName", "NodeManagerHostname", "NodeManagerAddress"), {*settings.excluded_nodes}
    away = [node["NodeID"] for node in ray.nodes() if excluded & {node[name] for name in names}]
    selector = {**settings.labels, **({"ray.io/node-id": f"!in({','.join(away)})"} if away else {})}
    strategy = "STRICT_SPREAD" if settings.nodes or not any(sizes) else settings.strategy
    return placement_group(bundles, strategy, bundle_label_selector=[selector] * len(bundles) if selector else None)


def look(rooms: Sequence[PlacementGroup], asked: dict[Any, tuple[str, Any]]) -> tuple[list[Held], list[str]]:
    """See what the run has, by a task in each bundle; it is run once the node is there, or Ray knows that it is lost.

    Args:
        rooms: all bundles of the first are needed; of the others, those that have been placed.
        asked: kept between looks: by bundle, its node and the answer to come. A task that was sent to a node that hangs
            stays there for good: when Ray has given the node up and placed the bundle anew, another one is sent.

    Returns:
        The bundles that have answered from where they lie now; and in words, those that have not.
    """
    nodes, held, missing = {node["NodeID"]: node for node in ray.nodes()}, list[Held](), list[str]()
    for room in rooms:
        for bundle, where in sorted(placement_group_table(room)["bundles_to_node_id"].items()):
            key, resources = (room, bundle), room.bundle_specs[bundle]
            if where not in nodes:
                missing += [str(resources)] if room is rooms[0] else []
                continue
            if key not in asked or asked[key][0] != where:
                task = ray.remote(num_cpus=0, num_gpus=resources.get("GPU", 0), max_retries=-1)(_own_gpus)
                asked[key] = where, task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(*key)).remote()
            name, address = nodes[where]["NodeName"], nodes[where]["NodeManagerAddress"]
            name += f" ({address})" if name != address else ""  # without one that a node is given, it is the address
            if ray.wait([asked[key][1]], timeout=0)[0]:
                held.append(Held(*key, name, address, ray.get(asked[key][1])))
            else:
                missing.append(f"{resources} ({name} does not answer)")
    return held, missing


def _own_gpus() -> list[str]:
    """What a task finds: the GPUs that Ray has given it, by their names on its node."""
    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def start(held: Held, name: str, *words: Any) -> tuple[Any, Any]:
    """Have an actor start a member in a bundle: the actor, and how the member ends."""
    where = PlacementGroupSchedulingStrategy(held.room, held.bundle)
    kind: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(Member)
    actor = kind.options(name=name, scheduling_strategy=where).remote()
    return actor, actor.run.remote(*words)


def what_there_is() -> str:
    """The cluster in words: what each node has, and what is free in all."""

    def amounts(resources: Mapping[str, float]) -> str:
        shown = (name for name in sorted(resources) if not any(own in name for own in ("node:", "_group_", "memory")))
        return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "nothing"

    nodes = sorted(f"{node['NodeName']}: {amounts(node['Resources'])}" for node in ray.nodes() if node["Alive"])
    return f"{'; '.join(nodes)}; free in all: {amounts(ray.available_resources())}"
