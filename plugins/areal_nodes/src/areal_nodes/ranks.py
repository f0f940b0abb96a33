"""The rank of this process, as torchrun, MPI, SLURM or Kubernetes writes it into the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

from areal_core.errors import UsageError


class _Names(NamedTuple):
    """Environment variables of a scheduler in addition to the rank; an empty name if the scheduler has none."""

    local_rank: str = ""
    nodes: str = ""
    size: str = ""
    local_size: str = ""


_NAMES = {
    "RANK": _Names("LOCAL_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK": _Names(
        "OMPI_COMM_WORLD_LOCAL_RANK", size="OMPI_COMM_WORLD_SIZE", local_size="OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "PMI_RANK": _Names("MPI_LOCALRANKID", size="PMI_SIZE", local_size="MPI_LOCALNRANKS"),
    "SLURM_PROCID": _Names("SLURM_LOCALID", nodes="SLURM_STEP_NUM_NODES"),
    "JOB_COMPLETION_INDEX": _Names(),
}
"""Variables by that of the rank. Inner schedulers come first: srun may start torchrun, but never the reverse."""
_SCHEDULER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Rank(NamedTuple):
    """The rank of a process among those that a scheduler has started.

    Attributes:
        rank: number among all processes, from 0.
        local_rank: number among the processes of its node, from 0.
        nodes: number of nodes; None if the scheduler does not say it.
    """

    rank: int
    local_rank: int
    nodes: int | None


def take_rank() -> Rank | None:
    """Read the rank of this process and delete its variables from the environment.

    The processes of the run inherit the environment and have ranks of their own. With the scheduler's variables, their
    libraries (torch, MPI) would wait for the scheduler's other processes.

    Returns:
        The rank; None if no scheduler has set one.

    Raises:
        UsageError: a variable is not a number.
    """
    schedulers = [name for name in _NAMES if os.environ.get(name)]
    if not schedulers:
        return None
    # Prefer a scheduler that has set a local rank: SLURM's PMI sets PMI_RANK without one, and SLURM itself has both.
    complete = [name for name in schedulers if os.environ.get(_NAMES[name].local_rank)]
    rank_name = (complete or schedulers)[0]
    rank = _number(rank_name) or 0
    local_rank, nodes, size, local_size = map(_number, _NAMES[rank_name])
    if nodes is None and size is not None:
        nodes = -(-size // (local_size or 1))  # rounded up
    for name in list(os.environ):
        if name in _RANK_VARIABLES or name.startswith(_SCHEDULER_PREFIXES):
            del os.environ[name]
    return Rank(rank, local_rank or 0, nodes)


def _number(name: str) -> int | None:
    """Return the value of an environment variable; None if it is not set or empty."""
    text = os.environ.get(name) or ""
    if text and not text.isdecimal():
        raise UsageError(
            f"the environment variable {name} is '{text}', but must be a whole number",
            hints=[f"unset {name} if no scheduler has started this program"],
        )
    return int(text) if text else None
