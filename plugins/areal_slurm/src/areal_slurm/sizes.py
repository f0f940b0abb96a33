"""Compare the resources of a job with the GPUs that the run's placement needs, before the job waits in a queue."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from areal_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import RunConfig

_GPUS = re.compile(r"gpu(?::[^:,(]*[^:,(\d][^:,(]*)?(?::(\d+))?(?:\([^)]*\))?")


def gpus_of(gres: str | None) -> int | None:
    """Return the GPUs per node in `--gres`: 8 for `gpu:8` and `gpu:h200:8,nvme:1`; None if it has no GPUs."""
    matches = [match for part in (gres or "").split(",") if (match := _GPUS.fullmatch(part.strip()))]
    return sum(int(match[1] or 1) for match in matches) if matches else None


def unused_note(config: RunConfig, gres: str | None) -> str:
    """Return a note if a job requests GPUs but the config assigns none; else an empty string."""
    placement = config.placement
    is_placed = placement.training is not None or placement.generation is not None
    if not gpus_of(gres) or is_placed or config.trainer_processes > 1:
        return ""
    return (
        f"note: --gres {gres} requests GPUs, but the config has no placement, so one trainer rank uses one of them; "
        "for 4 nodes with 8 GPUs each write placement='train=16 generate=tp1x16'"
    )


def check_sizes(config: RunConfig, nodes: str, gres: str | None, further: Sequence[str]) -> None:
    """Refuse a job with fewer GPUs than the placement needs.

    Args:
        config: config of the run.
        nodes: option of sbatch, `2` or `2-4`; another form is not checked.
        gres: option of sbatch; without GPUs in it nothing is checked, because the job may get them otherwise.
        further: further options of sbatch; if they set nodes or GPUs, nothing is checked.

    Raises:
        UsageError: the job has too few GPUs; the message has the number needed.
    """
    needed = len({*(config.placement.training or ()), *(config.placement.generation or ())})
    gpus_per_node, least_nodes = gpus_of(gres), re.fullmatch(r"(\d+)(?:-\d+)?", nodes)
    has_more = any(re.match(r"hetjob\b|-N|-G|--(nodes|gres|gpus)", option) for option in further)
    if not gpus_per_node or least_nodes is None or has_more or int(least_nodes[1]) * gpus_per_node >= needed:
        return
    requested = str(int(least_nodes[1]) * gpus_per_node)
    if least_nodes[1] != nodes:
        requested += " at least"
    raise UsageError(
        f"the placement needs {needed} GPUs, but --nodes {nodes} --gres {gres} requests {requested}",
        hints=[f"--nodes {-(-needed // gpus_per_node)}, or a placement on fewer GPUs"],
    )
