"""Which of a scheduler's like processes this is: what torchrun, MPI, SLURM and Kubernetes say in the environment."""

from __future__ import annotations

import os
from typing import NamedTuple

from areal_core.errors import UsageError

_RANKS = {
    "RANK": ("LOCAL_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_RANK": ("MPI_LOCALRANKID", "", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "SLURM_PROCID": ("SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "", ""),
    "JOB_COMPLETION_INDEX": ("", "", "", ""),
}
"""By the variable of the rank, the innermost scheduler first (torchrun may itself be started by srun): those of the
rank on its node, of how many nodes there are, and of how many processes there are, in all and on this node."""
_OF_A_SCHEDULER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Rank(NamedTuple):
    """A process among its like.

    Attributes:
        rank: among all.
        local_rank: among those of its node.
        nodes: how many there are; None where nothing says so.
    """

    rank: int
    local_rank: int
    nodes: int | None


def take_rank() -> Rank | None:
    """The rank of this process; None where no scheduler says one.

    Takes it out of the environment: processes of the run have ranks of their own, and libraries that found the
    scheduler's (torchrun's store, MPI) would wait for each other there.

    Raises:
        UsageError: a variable is no number.
    """
    said = [name for name in _RANKS if os.environ.get(name)]
    if not said:
        return None
    # SLURM's own PMI says the rank and not which one of the node it is; SLURM itself says both.
    found = next((name for name in said if os.environ.get(_RANKS[name][0])), said[0])
    local, nodes, size, local_size = (_number(name) for name in _RANKS[found])
    rank = _number(found) or 0
    if nodes is None and size is not None:
        nodes = -(-size // (local_size or 1))
    for name in [*os.environ]:
        if name in _OF_A_RANK or name.startswith(_OF_A_SCHEDULER):
            del os.environ[name]
    return Rank(rank, local or 0, nodes)


def _number(name: str) -> int | None:
    text = os.environ.get(name) or ""
    if text and not text.isdecimal():
        raise UsageError(f"the environment variable {name} is '{text}': it takes a number, 0 or more")
    return int(text) if text else None
