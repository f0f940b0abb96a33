"""The ranks of the trainer: who this process is among them, and failing together."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence


def join_group_of_one(device: torch.device) -> None:
    """Initialize `torch.distributed` with this process alone, where nobody has; shards and checkpoints need a group."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device() -> torch.device:
    """This process's GPU, which becomes the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_any_rank(condition: bool) -> bool:
    """Return whether a condition holds on at least one rank; collective."""
    return each_on_any_rank([condition])[0]


def each_on_any_rank(conditions: Sequence[bool]) -> list[bool]:
    """Return of each condition whether it holds on at least one rank; collective, with as many on every rank."""
    held = torch.tensor(conditions, dtype=torch.uint8)
    if rank_and_ranks()[1] > 1:
        dist.all_reduce(held, dist.ReduceOp.MAX)
    return [bool(value) for value in held.tolist()]


def fail_together(error: Exception | None, what: str) -> None:
    """Raise on every rank when one failed, so that no rank waits for another that is gone; collective.

    Raises:
        RunError: on the failed rank with its error, on the others with a pointer to it.
    """
    failed = on_any_rank(error is not None)
    if error is not None:
        raise RunError(f"{what} failed: {error}") from error
    if failed:
        raise RunError(f"{what} failed on another rank; its own message says why")
