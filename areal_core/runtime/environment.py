"""Environment variables between the driver, launchers, guards and members.

From the process that sets a variable to those that read it:

    driver     --HUB, TOKEN, ATTEMPT, TOKEN_FILE, LOGS-->  guard, member
    launcher   --GROUP, PLACES-------------------------->  guard, member     (`member_environment`)
    launcher   --TASK----------------------------------->  guard, member     (if one command starts several members)
      or its scheduler
    guard      --CONNECTION, GUARD, SCRATCH------------->  member
    hub        --NODES and others----------------------->  member            (in its reply to `Join`)

The driver hands its variables to `Launcher.start`, which adds its own and passes both to the process that it starts.
The hub also sends the rank of a process (RANK, LOCAL_RANK, WORLD_SIZE), its threads (OMP_NUM_THREADS), and the
variables of its process group.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.launcher import Place, ProcessGroup

HUB_VARIABLE = "AREAL_HUB"
"""Address of the driver's hub, such as `tcp:10.0.0.1:4711`."""
TOKEN_VARIABLE = "AREAL_TOKEN"
"""Secret of the run. The hub refuses a process without it. It also shows which processes belong to a run."""
ATTEMPT_VARIABLE = "AREAL_ATTEMPT"
"""Number of the run's attempt that the process belongs to."""
ACCESS_VARIABLES = frozenset({HUB_VARIABLE, TOKEN_VARIABLE, ATTEMPT_VARIABLE})
"""Variables that give access to the run. Foreign programs, such as an inference server, are started without them."""
TOKEN_FILE_VARIABLE = "AREAL_TOKEN_FILE"
"""File in the run folder that holds the token. A member that cannot read it there does not see the run folder."""
LOGS_VARIABLE = "AREAL_LOGS"
"""Folder of the run's logs. If it is not set, members write to the streams that they were started with."""

GROUP_VARIABLE = "AREAL_GROUP"
"""Name of the process group that the member belongs to."""
PLACES_VARIABLE = "AREAL_PLACES"
"""Places of members as JSON, `[[index, name, node, gpus], ...]`: one, or those of all tasks of a command, in order."""
TASK_VARIABLES = ("AREAL_TASK", "SLURM_PROCID")
"""Number of the task, from 0, if one command starts several members. The first variable that is set counts."""

START_VARIABLE = "AREAL_START"
"""Number of the start of a member, unique in a driver. A late message of an earlier start of the member has another."""

CONNECTION_VARIABLE = "AREAL_CONNECTION"
"""File descriptor of the connection to the hub, which the guard has opened. A process with it has a guard already."""
GUARD_VARIABLE = "AREAL_GUARD"
"""Process id of the guard, which is the parent of the member."""
SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""The member's private folder for sockets and weights, in memory if possible. The guard removes it."""

NODES_VARIABLE = "AREAL_NODES"
"""Number of nodes of the run. It is set only if there are several."""


def member_environment(group: ProcessGroup, places: Mapping[int, Place]) -> dict[str, str]:
    """Return the variables that a launcher adds to the environment of members; see `Launcher.start`.

    Args:
        group: the members' process group.
        places: places by index of the member. Name several if one command starts several members, as `srun` does, in
            the order of its tasks.
    """
    rows = [[index, group.member(index), place.node, place.gpus] for index, place in places.items()]
    return {GROUP_VARIABLE: group.name, PLACES_VARIABLE: json.dumps(rows)}


def run_name(environment: Mapping[str, str]) -> str:
    """Return the name of the run folder, from the environment that `Launcher.start` gets; `run` if it is not there.

    Example:
        >>> from areal_core.launchers import run_name
        >>> run_name({"AREAL_LOGS": "/shared/runs/math/logs"})
        'math'
    """
    return Path(environment.get(LOGS_VARIABLE, "run/logs")).parent.name


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """Which member a process is, and where it runs.

    Attributes:
        group: name of its process group.
        index: of the member in its group, from 0.
        name: of the member, unique in the run.
        node: name of its node.
        gpus: numbers of its GPUs on the node.
        start: number of its start; see `START_VARIABLE`.
    """

    group: str
    index: int
    name: str
    node: str
    gpus: list[int]
    start: int = 0


def member_place(environment: Mapping[str, str]) -> MemberPlace:
    """Read the place of a member from its environment, where `member_environment` has written it."""
    rows = json.loads(environment[PLACES_VARIABLE])
    task = next((environment[name] for name in TASK_VARIABLES if name in environment), "0")
    row = rows[int(task)] if len(rows) > 1 else rows[0]
    start = int(environment.get(START_VARIABLE, "0"))
    index, name, node, gpus = row
    return MemberPlace(environment[GROUP_VARIABLE], index, name, node, gpus, start)
