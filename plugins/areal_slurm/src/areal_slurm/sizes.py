"""What a job asks SLURM for, held against the GPUs that the run's placement needs, before it waits in a queue."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from areal_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import RunConfig

_GPUS = re.compile(r"gpu(?::[^:,(]*[^:,(\d][^:,(]*)?(?::(\d+))?(?:\([^)]*\))?")


def gpus_of(gres: str | None) -> int | None:
    """GPUs of each node that `--gres` asks for: 8 of `gpu:8` and `gpu:h200:8,nvme:1`; None where it names none."""
    found = [match for part in (gres or "").split(",") if (match := _GPUS.fullmatch(part.strip()))]
    return sum(int(match[1] or 1) for match in found) if found else None


def unused_note(config: RunConfig, gres: str | None) -> str:
    """Return a note on a job that asks for GPUs and a config that assigns none; empty if there is nothing to say."""
    placement = config.placement
    is_placed = placement.training is not None or placement.generation is not None
    if not gpus_of(gres) or is_placed or config.trainer_processes > 1:
        return ""
    return (
        f"note: --gres {gres} asks for GPUs, and the config has no placement, so one trainer rank uses one of them; "
        "for 4 nodes with 8 GPUs each write placement='train=16 generate=tp1x16'"
    )


def check_sizes(config: RunConfig, nodes: str, gres: str | None, further: Sequence[str]) -> None:
    """Refuse a job with fewer GPUs than the placement needs.

    Args:
        config: of the run.
        nodes: the option of sbatch, `2` or `2-4`; in another form it is left to SLURM.
        gres: the option of sbatch; without GPUs in it the job may get them in another way, which is left to SLURM.
        further: options of sbatch; where they speak of nodes and GPUs as well, all is left to SLURM.

    Raises:
        UsageError: it has; says what is needed.
    """
    needed = len({*(config.placement.training or ()), *(config.placement.generation or ())})
    each, least = gpus_of(gres), re.fullmatch(r"(\d+)(?:-\d+)?", nodes)
    has_more = any(re.match(r"hetjob\b|-N|-G|--(nodes|gres|gpus)", option) for option in further)
    if not each or least is None or has_more or int(least[1]) * each >= needed:
        return
    has = f"{int(least[1]) * each}{'' if least[1] == nodes else ' at least'}"
    raise UsageError(
        f"the placement needs {needed} GPUs, and --nodes {nodes} --gres {gres} asks for {has}",
        hints=[f"--nodes {-(-needed // each)}, or a placement on fewer GPUs"],
    )
