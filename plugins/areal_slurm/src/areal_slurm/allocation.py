"""The allocation that this program is inside of: its job, nodes and their GPUs, as SLURM's controller knows them.

Everything is read with SLURM's own commands, not from the environment, which describes the moment of the start: nodes
go while a job with `--no-kill` lasts, and options for GPUs have many names.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from areal_core.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 60.0
"""A controller that is busy or fails over to another one answers late."""
ANSWER_S = 3.0
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(),\s]+)?:\d+")


class Share(NamedTuple):
    """What the job has of a node.

    Attributes:
        gres: its GPUs, as `srun --gres` takes them; `none` where it has none.
        component: which one of a heterogeneous job has the node; empty for other jobs.
    """

    gres: str = "none"
    component: str = ""

    @property
    def gpus(self) -> int:
        """How many there are."""
        return sum(int(part.rpartition(":")[2]) for part in self.gres.split(",") if part != "none")


class NodeState(NamedTuple):
    """A node as SLURM's controller knows it; `port` is that of its daemon."""

    address: str
    port: int
    state: str

    @property
    def is_lost(self) -> bool:
        """Whether the controller does not reach it or has given it up, which takes minutes."""
        return "*" in self.state or "NOT_RESPONDING" in self.state or self.state.startswith("DOWN")


def slurm(*command: str) -> str:
    """What one of SLURM's commands answers.

    Raises:
        RunError: it is not there, refuses, or does not answer in time.
    """
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        hint = "run this where SLURM's commands are, in its PATH"
        raise RunError(f"there is no {command[0]} on this machine", hints=[hint]) from None
    except subprocess.TimeoutExpired:
        message = f"{' '.join(command)}: no answer within {TIMEOUT_S:g} s"
        raise RunError(message, hints=["ask SLURM: scontrol ping"]) from None
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def own_job() -> str:
    """The number of the job.

    Raises:
        UsageError: this program is inside of none.
    """
    if not (number := os.environ.get("SLURM_JOB_ID")):
        hints = ["submit it: areal slurm submit CONFIG --nodes=N", "or get an allocation: salloc --nodes=N --no-kill"]
        raise UsageError("launcher.type is slurm, and this program is not inside of an allocation", hints=hints)
    return number


def read_job(number: str) -> tuple[dict[str, str], dict[str, Share]]:
    """A job as it is now: its fields, and what it has of which nodes.

    Raises:
        RunError: SLURM does not answer.
    """
    fields, parts = parse_job(number, slurm("scontrol", "show", "job", "--details", number))
    return fields, {name: share for nodes, share in parts for name in expand(nodes)}


def parse_job(number: str, text: str) -> tuple[dict[str, str], list[tuple[str, Share]]]:
    """A job, as `scontrol show job --details` tells of it, and for the last one of an array of all others as well.

    Returns:
        Its fields, of a heterogeneous one those of the first component; expressions of nodes of all components, each
        with what the job has of every one of them.
    """
    components: list[dict[str, str]] = []
    parts, is_own = [], False
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "JobId" in fields and (is_own := number in (fields["JobId"], fields.get("HetJobId"))):
            components.append({})
        if is_own and "Nodes" in fields and "CPU_IDs" in fields:
            gres = ",".join(_GPUS.findall(line.partition(" GRES=")[2])) or "none"
            parts.append((fields["Nodes"], Share(gres, components[-1].get("HetJobOffset", ""))))
        elif is_own:
            components[-1] |= fields
    return components[0], parts


def expand(expression: str) -> list[str]:
    """The names of nodes, written as SLURM does: `n[1-3,7]`."""
    return slurm("scontrol", "show", "hostnames", expression).split() if expression else []


def read_nodes(names: Sequence[str]) -> dict[str, NodeState]:
    """What SLURM says of some nodes.

    Raises:
        RunError: it does not answer, or does not know one of them.
    """
    port = dict(re.findall(r"^(\w+) *= (\S+)", slurm("scontrol", "show", "config"), re.MULTILINE))["SlurmdPort"]
    text = slurm("scontrol", "show", "node", "-o", ",".join(names)) if names else ""
    facts = [{"Port": port, **dict(_FIELD.findall(line))} for line in text.splitlines() if line.strip()]
    return {fact["NodeName"]: NodeState(fact["NodeAddr"], int(fact["Port"]), fact["State"]) for fact in facts}


def reach(node: NodeState) -> str:
    """The address from which this machine reaches SLURM's daemon on a node; empty where it does not."""
    with suppress(OSError), socket.create_connection((node.address, node.port), ANSWER_S) as connection:
        return str(connection.getsockname()[0])
    return ""


def own_address(names: Sequence[str]) -> str:
    """The address from which this machine reaches the other nodes, so that they reach it under that.

    Raises:
        RunError: there is no way to them.
    """
    here = os.environ.get("SLURMD_NODENAME")
    nodes = read_nodes(names)
    for name in sorted(nodes, key=lambda name: name == here):
        if address := reach(nodes[name]):
            return address
    raise RunError(f"none of the nodes answers: {', '.join(nodes)}", hints=["ask SLURM: sinfo"])
