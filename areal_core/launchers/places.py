"""What a member is told of its place: written by launchers, read by members."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.launcher import Place, ProcessGroup

GROUP_VARIABLE, PLACES_VARIABLE = "AREAL_GROUP", "AREAL_PLACES"
TASK_VARIABLES = ("AREAL_TASK", "SLURM_PROCID")


def member_environment(group: ProcessGroup, places: Mapping[int, Place]) -> dict[str, str]:
    """What members of a group are told of their places by whoever starts them; see `Launcher.start`.

    Args:
        group: of them.
        places: by index; several for like tasks of one step, in the order of the tasks.
    """
    told = [[index, group.member(index), place.node, place.gpus] for index, place in places.items()]
    return {GROUP_VARIABLE: group.name, PLACES_VARIABLE: json.dumps(told)}


class OwnPlace(NamedTuple):
    """Which member a process is, and where."""

    number: int
    name: str
    node: str
    gpus: list[int]


def own_place(environment: Mapping[str, str]) -> OwnPlace:
    """What a launcher has told; see `member_environment`."""
    places = json.loads(environment[PLACES_VARIABLE])
    tasks = (environment[name] for name in TASK_VARIABLES if name in environment)
    return OwnPlace(*places[int(next(tasks, "0")) if len(places) > 1 else 0])
