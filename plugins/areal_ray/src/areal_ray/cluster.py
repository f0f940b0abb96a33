"""Calls of Ray. Every function may block, so the launcher calls them in a separate thread."""

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

OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Environment variables for a cluster that this program starts: no usage reports, no lowered priority of processes."""


class Bundle(NamedTuple):
    """A bundle of a placement group that the run has.

    Attributes:
        placement_group: the placement group.
        bundle_index: index of the bundle in it.
        node: name of the bundle's node, with its address, because Ray allows several nodes of the same name.
        address: address of that node.
        gpus: GPUs that Ray has assigned there, as `CUDA_VISIBLE_DEVICES` names them.
    """

    placement_group: PlacementGroup
    bundle_index: int
    node: str
    address: str
    gpus: list[str]


def connect(settings: RaySettings) -> str:
    """Become a driver of the cluster, and return the address of this machine in it.

    Raises:
        RunError: there is no cluster, or it does not answer.
    """
    address, host = settings.address or "local", settings.host
    if address == "local":
        os.environ.update({**OWN_CLUSTER, **os.environ})
        host = host or "127.0.0.1"
    known_address = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    options = {"runtime_env": settings.runtime_env or None, "log_to_driver": False, "logging_level": 40}
    try:
        if ":" in known_address:  # check first: Ray waits minutes for an address that does not answer, then exits
            name, _, port = known_address.rpartition(":")
            socket.create_connection((name.strip("[]"), int(port)), timeout=10.0).close()
        ray.init(address, _node_ip_address=host, include_dashboard=None if settings.address else False, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        hints = ["start one with: ray start --head", "or use a Ray of this machine only: launcher.address=null"]
        raise RunError(f"the Ray cluster at {address} cannot be reached: {error}", hints=hints) from error
    # Without this, Ray prints the logs of lost nodes, even with `log_to_driver` off.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return host or ray.util.get_node_ip_address()


def bundles_for(groups: Sequence[ProcessGroup], nodes: int | None) -> list[int]:
    """Return the GPUs of each bundle that groups need: a bundle for each member, or one per machine if `nodes` is set.

    Shared GPUs are counted once, in the larger parts: servers' rather than ranks'. GPUs that the config names are on
    one machine, and several servers may name the same ones.
    """
    if not nodes and (named := {gpu for group in groups for gpu in group.gpus or ()}):
        return [len(named)]
    sizes_by_role: dict[str, list[int]] = {"": []}
    are_shared = any(group.shares_gpus for group in groups)
    for group in groups:
        shares = group.shares_gpus or (are_shared and group.role == "trainer")
        sizes_by_role.setdefault(group.role if shares else "", []).extend([group.gpus_each] * group.count)
    sizes = sizes_by_role.pop("") + max(sizes_by_role.values(), key=lambda side: (sum(side), max(side)), default=[])
    sizes = [gpus for gpus in sizes if gpus]
    return [-(-sum(sizes) // (nodes or 1))] * (nodes or 1) if nodes or not sizes else sizes


def request_bundles(settings: RaySettings, sizes: Sequence[int]) -> PlacementGroup:
    """Request bundles with these GPUs. Ray places them when it can, and places those of a lost node again."""
    bundles = [{"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {}), **settings.resources} for gpus in sizes]
    names, excluded = ("NodeName", "NodeManagerHostname", "NodeManagerAddress"), {*settings.excluded_nodes}
    excluded_ids = [node["NodeID"] for node in ray.nodes() if excluded & {node[name] for name in names}]
    selector = {**settings.labels, **({"ray.io/node-id": f"!in({','.join(excluded_ids)})"} if excluded_ids else {})}
    strategy = "STRICT_SPREAD" if settings.nodes or not any(sizes) else settings.strategy
    return placement_group(bundles, strategy, bundle_label_selector=[selector] * len(bundles) if selector else None)


def check_bundles(
    placement_groups: Sequence[PlacementGroup], probes: dict[Any, tuple[str, Any]]
) -> tuple[list[Bundle], list[str]]:
    """Check which bundles the run has, with a task in each. The task runs when the node is there.

    Args:
        placement_groups: all bundles of the first one are needed; of the others, those that have been placed.
        probes: kept between calls: node and pending result by bundle. A task that was sent to a node that hangs stays
            there. When Ray has given up the node and placed the bundle again, a new task is sent.

    Returns:
        The bundles that have answered from their present node, and descriptions of those that have not.
    """
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    answering: list[Bundle] = []
    missing: list[str] = []
    for group in placement_groups:
        for bundle, node_id in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
            key, resources = (group, bundle), group.bundle_specs[bundle]
            if node_id not in nodes:
                if group is placement_groups[0]:
                    missing.append(str(resources))
                continue
            if key not in probes or probes[key][0] != node_id:
                task = ray.remote(num_cpus=0, num_gpus=resources.get("GPU", 0), max_retries=-1)(_own_gpus)
                probes[key] = node_id, task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(*key)).remote()
            name, address = nodes[node_id]["NodeName"], nodes[node_id]["NodeManagerAddress"]
            if name != address:  # a node without a name of its own has its address as its name
                name += f" ({address})"
            if ray.wait([probes[key][1]], timeout=0)[0]:
                answering.append(Bundle(*key, name, address, ray.get(probes[key][1])))
            else:
                missing.append(f"{resources} ({name} does not answer)")
    return answering, missing


def _own_gpus() -> list[str]:
    """Return the GPUs that Ray has assigned to the task that calls this, by their names on the node."""
    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def start(bundle: Bundle, name: str, *arguments: Any) -> tuple[Any, Any]:
    """Start an actor in a bundle that runs a member. Return the actor, and the reference to the member's outcome."""
    strategy = PlacementGroupSchedulingStrategy(bundle.placement_group, bundle.bundle_index)
    remote_class: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(Member)
    actor = remote_class.options(name=name, scheduling_strategy=strategy).remote()
    return actor, actor.run.remote(*arguments)


def describe_cluster() -> str:
    """Describe the resources of each node, and what is free in all."""

    def amounts(resources: Mapping[str, float]) -> str:
        hidden = ("node:", "_group_", "memory")
        names = (name for name in sorted(resources) if not any(part in name for part in hidden))
        return ", ".join(f"{resources[name]:g} {name}" for name in names) or "nothing"

    nodes = sorted(f"{node['NodeName']}: {amounts(node['Resources'])}" for node in ray.nodes() if node["Alive"])
    return f"{'; '.join(nodes)}; free in all: {amounts(ray.available_resources())}"
