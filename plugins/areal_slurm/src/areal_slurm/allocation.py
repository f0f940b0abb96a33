"""The SLURM allocation of this process: its job, nodes and GPUs, as SLURM's controller reports them.

Everything is read with SLURM's commands instead of from the environment. The environment describes the start: a job
with `--no-kill` may lose nodes later, and options for GPUs have many names.
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
"""Seconds that a SLURM command may take. A busy controller, or one that fails over, answers late."""
CONNECT_TIMEOUT_S = 3.0
"""Seconds to connect to SLURM's daemon on a node."""
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(),\s]+)?:\d+")


class Share(NamedTuple):
    """Resources of the job on a node.

    Attributes:
        gres: GPUs, in the format of `srun --gres`; `none` without GPUs.
        component: component of a heterogeneous job that has the node; empty for other jobs.
    """

    gres: str = "none"
    component: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(int(part.rpartition(":")[2]) for part in self.gres.split(",") if part != "none")


class NodeState(NamedTuple):
    """State of a node, as SLURM's controller reports it. `port` is the port of its daemon."""

    address: str
    port: int
    state: str

    @property
    def is_lost(self) -> bool:
        """True if the controller has lost or given up the node, which it notices only after minutes."""
        return "*" in self.state or "NOT_RESPONDING" in self.state or self.state.startswith("DOWN")


def slurm(*command: str) -> str:
    """Run one of SLURM's commands and return its output.

    Raises:
        RunError: the command is missing, fails, or takes too long.
    """
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        hint = "run this on a machine that has SLURM's commands in its PATH"
        raise RunError(f"the command {command[0]} was not found on this machine", hints=[hint]) from None
    except subprocess.TimeoutExpired:
        message = f"{' '.join(command)}: no answer within {TIMEOUT_S:g} s"
        raise RunError(message, hints=["check SLURM's controller: scontrol ping"]) from None
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def own_job() -> str:
    """Return the id of the job that this process belongs to.

    Raises:
        UsageError: this process is not inside an allocation.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        hints = ["submit it: areal slurm submit CONFIG --nodes=N", "or get an allocation: salloc --nodes=N --no-kill"]
        raise UsageError("launcher.type is slurm, but this program is not inside an allocation", hints=hints)
    return job_id


def read_job(number: str) -> tuple[dict[str, str], dict[str, Share]]:
    """Return the present fields of a job, and its share of each node, by node name.

    Raises:
        RunError: SLURM does not answer.
    """
    fields, parts = parse_job(number, slurm("scontrol", "show", "job", "--details", number))
    return fields, {name: share for nodes, share in parts for name in expand(nodes)}


def parse_job(number: str, text: str) -> tuple[dict[str, str], list[tuple[str, Share]]]:
    """Parse the output of `scontrol show job --details`, which for the last job of an array lists the others, too.

    Args:
        number: id of the job.
        text: output of the command.

    Returns:
        The fields of the job (of a heterogeneous one those of the first component), and pairs of a node expression and
        the job's share of each of these nodes.
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
    """Return the node names of an expression of SLURM, such as `n[1-3,7]`."""
    return slurm("scontrol", "show", "hostnames", expression).split() if expression else []


def read_nodes(names: Sequence[str]) -> dict[str, NodeState]:
    """Return the states of nodes, by name.

    Raises:
        RunError: SLURM does not answer, or does not know a node.
    """
    port = dict(re.findall(r"^(\w+) *= (\S+)", slurm("scontrol", "show", "config"), re.MULTILINE))["SlurmdPort"]
    text = slurm("scontrol", "show", "node", "-o", ",".join(names)) if names else ""
    facts = [{"Port": port, **dict(_FIELD.findall(line))} for line in text.splitlines() if line.strip()]
    return {fact["NodeName"]: NodeState(fact["NodeAddr"], int(fact["Port"]), fact["State"]) for fact in facts}


def reach(node: NodeState) -> str:
    """Return this machine's address on the route to SLURM's daemon on a node, or "" if it is unreachable."""
    with suppress(OSError), socket.create_connection((node.address, node.port), CONNECT_TIMEOUT_S) as connection:
        return str(connection.getsockname()[0])
    return ""


def own_address(names: Sequence[str]) -> str:
    """Return this machine's address on the route to the other nodes, under which they can reach it.

    Raises:
        RunError: no node can be reached.
    """
    here = os.environ.get("SLURMD_NODENAME")
    nodes = read_nodes(names)
    for name in sorted(nodes, key=lambda name: name == here):
        if address := reach(nodes[name]):
            return address
    raise RunError(f"none of the nodes answers: {', '.join(nodes)}", hints=["check the nodes: sinfo"])
