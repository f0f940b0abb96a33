"""What a job asks SLURM for, held against what the run's placement needs, before it waits in a queue."""

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


def says_more(further: Sequence[str]) -> bool:
    """Whether other options of sbatch speak of nodes and GPUs as well, or of further groups of nodes."""
    return any(re.match(r"hetjob\b|-N|-G|--(nodes|gres|gpus)", option) for option in further)


def check_sizes(config: RunConfig, nodes: str, gpus: int | None) -> None:
    """Refuse a job that is too small, or has other GPUs than they were counted with.

    Args:
        config: of the run.
        nodes: the option of sbatch, `2` or `2-4`; in another form it is left to SLURM.
        gpus: that each is asked to have, None where the job does not say.

    Raises:
        UsageError: it is; says what is needed.
    """
    placement, counted = config.placement, config.launcher.keywords().get("gpus_per_node")
    named = [*(placement.training or ()), *(placement.generation or ())]
    if not named:
        return
    if counted and gpus is not None and counted != gpus:
        raise UsageError(
            f"the placement counts with launcher.gpus_per_node={counted}, and --gres asks for {gpus} on each node",
            hints=[f"--gres gpu:{counted}, or launcher.gpus_per_node={gpus}"],
        )
    each, least = counted or gpus, re.fullmatch(r"(\d+)(?:-\d+)?", nodes)
    if not each or least is None:
        return
    needed = max(named) // each + 1
    if int(least[1]) < needed:
        raise UsageError(
            f"the placement needs {needed} nodes with {each} GPUs each, GPU {max(named)} being the last, and --nodes "
            f"{nodes} asks for {least[1]}" + ("" if least[1] == nodes else " at least"),
            hints=[f"--nodes {needed}, or a placement on fewer GPUs"],
        )
