"""The allocation that this program is inside of: its job, nodes and their GPUs, as SLURM's controller knows them.

Everything is read from `scontrol show job`, not from the environment, which describes the moment of the start: nodes
go while a job with `--no-kill` lasts, and options for GPUs have many names.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.errors import RunError, UsageError
from areal_slurm.commands import slurm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(),\s]+)?:\d+")
_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the allocation.

    Attributes:
        name: of SLURM's.
        gpus: that the job has there, as `srun --gres` takes them; `none` where it has none.
        group: which component of a heterogeneous job has it; None for other jobs.
    """

    name: str
    gpus: str = "none"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One component of a job; most jobs have one.

    Attributes:
        fields: as `scontrol show job` names them.
        parts: expressions of nodes, each with the GPUs that the job has on every one of them.
    """

    fields: Mapping[str, str]
    parts: Sequence[tuple[str, str]]

    @property
    def is_running(self) -> bool:
        """Whether nobody has cancelled it."""
        return self.fields.get("JobState") == "RUNNING"

    @property
    def is_preempted(self) -> bool:
        """Whether another job has been given its place."""
        return self.fields.get("PreemptTime", "None") != "None"


def own_job() -> str:
    """The number of the job.

    Raises:
        UsageError: this program is inside of none.
    """
    if not (number := os.environ.get("SLURM_JOB_ID")):
        raise UsageError(
            "launcher.type is slurm, and this program is not inside of an allocation: SLURM_JOB_ID is not set",
            hints=[
                "submit it: areal slurm submit CONFIG --nodes=N",
                "or get an allocation: salloc --nodes=N --no-kill",
            ],
        )
    return number


def read_job(number: str) -> list[Job]:
    """The components of a job, the leading one first.

    Raises:
        RunError: SLURM does not answer.
    """
    return parse_jobs(slurm("scontrol", "show", "job", "--details", number))


def parse_jobs(text: str) -> list[Job]:
    """The components of a job, as `scontrol show job --details` tells of them."""
    blocks = re.split(r"^(?=JobId=)", text, flags=re.MULTILINE)
    return [_parse(block) for block in blocks if block.startswith("JobId=")]


def _parse(block: str) -> Job:
    head, parts = {}, []
    for line in block.splitlines():
        fields = dict(_FIELD.findall(line))
        if "Nodes" in fields and "CPU_IDs" in fields:
            parts.append((fields["Nodes"], ",".join(_GPUS.findall(line.partition(" GRES=")[2])) or "none"))
        else:
            head.update(fields)
    return Job(head, parts)


def read_nodes(number: str) -> list[Node]:
    """The nodes that the job has now.

    Raises:
        RunError: SLURM does not answer.
    """
    jobs, nodes = read_job(number), []
    for job in jobs:
        group = int(job.fields["HetJobOffset"]) if "HetJobOffset" in job.fields else None
        for expression, gpus in job.parts:
            nodes += [Node(name, gpus, group) for name in expand(expression)]
    return nodes


def expand(expression: str) -> list[str]:
    """The names of nodes, written as SLURM does: `n[1-3,7]`."""
    return slurm("scontrol", "show", "hostnames", expression).split() if expression else []


def lost_nodes(names: Sequence[str]) -> dict[str, str]:
    """Those of some nodes that SLURM's controller does not reach or has given up, with the reason."""
    states = dict(
        line.split()[:2] for line in slurm("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T").splitlines()
    )
    found = {name: states.get(name, "unknown") for name in names}
    return {name: f"SLURM says that it is {s}" for name, s in found.items() if s[-1] == "*" or s in ("down", "unknown")}


def own_address(nodes: Sequence[Node]) -> str:
    """The address from which this machine reaches the other nodes, so that they reach it under that.

    Raises:
        RunError: there is no way to them.
    """
    here = os.environ.get("SLURMD_NODENAME")
    others = [node.name for node in nodes if node.name != here] or [node.name for node in nodes]
    tried = []
    for name in others[:8]:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            address = dict(_FIELD.findall(slurm("scontrol", "show", "node", "-o", name)))["NodeAddr"]
            tried.append(f"{name} ({address})")
            probe.connect((address, _DISCARD_PORT))  # sends nothing; the kernel chooses the way
            return str(probe.getsockname()[0])
    raise RunError(
        f"the address under which other nodes reach this one cannot be told: no way to {', '.join(tried)}",
        hints=["name it: launcher.host=ADDRESS"],
    )
