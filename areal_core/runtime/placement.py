"""Placement: which node and which GPUs each member of the process groups gets.

All groups are placed in one pass. Two passes that run concurrently would give one GPU away twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node, Place

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from areal_core.interfaces.launcher import ProcessGroup

Places = dict[tuple[str, int], Place]
"""Places by group name and index of the member."""


def place_groups(
    groups: Sequence[ProcessGroup],
    nodes: Sequence[Node],
    taken: Mapping[tuple[str, int], Place],
    sharing: Collection[str] = (),
) -> Places:
    """Place every member of some groups that does not run yet.

    Members with GPUs fill the nodes one after the other; all GPUs of one member are on one node. Members that share
    GPUs get GPUs of the other side (trainer or servers). Ranks and servers without GPUs are spread over the nodes. All
    other members are placed beside the group that theirs names, or on the first node.

    Args:
        groups: to be placed, in this order.
        nodes: may be used, in this order.
        taken: places of members that run.
        sharing: names of running groups that share their GPUs with others.

    Raises:
        RunError: there is no room. The message names what is needed and what there is.
    """
    if not nodes:
        raise RunError("there is no node to start anything on")
    places: Places = {}
    all_sharing = {*sharing, *(group.name for group in groups if group.shares_gpus)}
    for group in groups:
        for index in range(group.count):
            if (group.name, index) in taken:
                continue
            all_taken = {**taken, **places}
            if group.gpus_each and group.gpus is not None:
                place = _named_gpus(group, index, nodes)
            elif group.gpus_each:
                place = _free_gpus(group, nodes, all_taken, all_sharing)
            else:
                place = Place(_node_without_gpus(group, index, nodes, all_taken))
            places[group.name, index] = place
    return places


def _named_gpus(group: ProcessGroup, index: int, nodes: Sequence[Node]) -> Place:
    """Return the GPUs that the config names for a member, on the only node."""
    assert group.gpus is not None
    gpus = group.gpus[index * group.gpus_each : (index + 1) * group.gpus_each]
    node = nodes[0]
    if len(nodes) > 1:
        raise RunError(
            f"the placement names GPUs by number, and the run has {len(nodes)} nodes",
            hints=["give numbers instead: placement='train=8 generate=tp2x4'"],
        )
    if node.gpus and max(gpus) >= node.gpus:
        raise RunError(f"{group.member(index)} is to use GPU {max(gpus)}, and {node.name} has {node.gpus}, from 0")
    return Place(node.name, gpus)


def _free_gpus(group: ProcessGroup, nodes: Sequence[Node], taken: Places, sharing: set[str]) -> Place:
    """Return free GPUs of the first node that has enough of them."""
    for node in nodes:
        used = {
            gpu
            for (name, _), place in taken.items()
            if place.node == node.name and _excludes(name, group.name, sharing)
            for gpu in place.gpus
        }
        free = [gpu for gpu in range(node.gpus) if gpu not in used]
        if len(free) >= group.gpus_each:
            return Place(node.name, tuple(free[: group.gpus_each]))
    gpus_of_nodes = ", ".join(f"{node.name}: {node.gpus}" for node in nodes)
    taken_gpus = sum(len(place.gpus) for place in taken.values())
    raise RunError(
        f"{group.name} needs {group.gpus_each} free GPU(s) of one node for each of {group.count} member(s); the nodes "
        f"have {gpus_of_nodes}, and {taken_gpus} are given to others",
        hints=["ask for fewer in placement, or give the run more nodes"],
    )


def _excludes(other: str, name: str, sharing: set[str]) -> bool:
    """Return whether the GPUs of another group are not free for this one.

    If one of the two shares its GPUs, only groups of the same kind exclude each other: servers other servers.
    """
    is_shared = bool(sharing & {name, other})
    return not is_shared or _kind(other) == _kind(name)


def _kind(name: str) -> str:
    """Return the name of a group without its number: `server` for `server-2`."""
    return name.rpartition("-")[0] or name


def _node_without_gpus(group: ProcessGroup, index: int, nodes: Sequence[Node], taken: Places) -> str:
    """Return the node of a member that needs no GPU."""
    neighbor = taken.get((group.beside, 0))
    if neighbor is not None:
        return neighbor.node
    if group.count > 1:
        spread = index * len(nodes) // group.count if group.count >= len(nodes) else index
        return nodes[spread].name
    if group.is_server:
        nodes_of_servers = [place.node for (name, _), place in taken.items() if _kind(name) == _kind(group.name)]
        return min(nodes, key=lambda node: nodes_of_servers.count(node.name)).name
    return nodes[0].name
