"""Where the members of process groups stand: all of them in one pass, for two passes would give one GPU away twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Node, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.launcher import ProcessGroup

Places = dict[tuple[str, int], Place]


def place(groups: Sequence[ProcessGroup], nodes: Sequence[Node], taken: Mapping[tuple[str, int], Place]) -> Places:
    """Place every member of some groups.

    Members with GPUs fill the nodes one after the other, and none stands on two; those that share GPUs with
    others take these others' GPUs. Ranks without GPUs are spread over the nodes, as are servers; everything else
    stands beside the group that it names, or on the first node.

    Args:
        groups: to be placed, in this order.
        nodes: that may be used.
        taken: places of members that run.

    Raises:
        RunError: there is no room; says for what, and what there is.
    """
    if not nodes:
        raise RunError("there is no node to start anything on")
    places: Places = {}
    for group in groups:
        for index in range(group.count):
            where = {**taken, **places}
            key = group.name, index
            if group.gpus_each and group.gpus is not None:
                places[key] = _named(group, index, nodes)
            elif group.gpus_each:
                places[key] = _free(group, groups, nodes, where)
            else:
                places[key] = Place(_without_gpus(group, index, nodes, where))
    return places


def _named(group: ProcessGroup, index: int, nodes: Sequence[Node]) -> Place:
    """GPUs that the config names, on the one machine that there is."""
    assert group.gpus is not None
    own = group.gpus[index * group.gpus_each : (index + 1) * group.gpus_each]
    node = nodes[0]
    if len(nodes) > 1:
        raise RunError(
            f"the placement names GPUs by number, and the run has {len(nodes)} nodes",
            hints=["give numbers instead: placement='train=8 generate=tp2x4'"],
        )
    if node.gpus and max(own) >= node.gpus:
        raise RunError(f"{group.member(index)} is to use GPU {max(own)}, and {node.name} has {node.gpus}, from 0")
    return Place(node.name, own)


def _free(group: ProcessGroup, groups: Sequence[ProcessGroup], nodes: Sequence[Node], where: Places) -> Place:
    """The first node with so many free GPUs; for a group that shares, GPUs that only the other side uses."""
    sharing = {one.name for one in groups if one.shares_gpus}
    for node in nodes:
        others = [one for (name, _), one in where.items() if one.node == node.name and _counts(name, group, sharing)]
        used = {gpu for one in others for gpu in one.gpus}
        free = [gpu for gpu in range(node.gpus) if gpu not in used]
        if len(free) >= group.gpus_each:
            return Place(node.name, tuple(free[: group.gpus_each]))
    has = ", ".join(f"{node.name}: {node.gpus}" for node in nodes)
    held = sum(len(one.gpus) for one in where.values())
    raise RunError(
        f"{group.name} needs {group.gpus_each} free GPU(s) of one node for each of {group.count} member(s); the nodes "
        f"have {has}, and {held} are given to others",
        hints=["ask for fewer in placement, or give the run more nodes"],
    )


def _counts(name: str, group: ProcessGroup, sharing: set[str]) -> bool:
    """Whether what another group uses is not free for this one: where one of them shares, only its like."""
    return not sharing & {group.name, name} or _side(name) == _side(group.name)


def _side(name: str) -> str:
    return name.rpartition("-")[0] or name


def _without_gpus(group: ProcessGroup, index: int, nodes: Sequence[Node], where: Places) -> str:
    if beside := where.get((group.beside, 0)):
        return beside.node
    if group.count > 1:
        return nodes[index * len(nodes) // group.count].name if group.count >= len(nodes) else nodes[index].name
    if group.role == "server":
        like = [one.node for (name, _), one in where.items() if _side(name) == _side(group.name)]
        return min(nodes, key=lambda node: like.count(node.name)).name
    return nodes[0].name
