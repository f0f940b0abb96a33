"""The trainer's ranks: this process's rank and device, and errors that all ranks raise together."""

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
    """Initialize `torch.distributed` with only this process, unless it is initialized.

    Sharding and checkpoints need a process group even on one rank.
    """
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device() -> torch.device:
    """Return this process's GPU, and make it the current device; the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_any_rank(condition: bool) -> bool:
    """Return True if a condition holds on at least one rank; collective."""
    return each_on_any_rank([condition])[0]


def each_on_any_rank(conditions: Sequence[bool]) -> list[bool]:
    """Return for each condition whether it holds on at least one rank; collective. All ranks pass equally many."""
    held = torch.tensor(conditions, dtype=torch.uint8)
    if rank_and_ranks()[1] > 1:
        dist.all_reduce(held, dist.ReduceOp.MAX)
    return [bool(value) for value in held.tolist()]


def fail_together(error: Exception | None, action: str) -> None:
    """Raise an error on every rank if one rank failed, so that no rank waits for it; collective.

    Args:
        error: this rank's error, or None.
        action: the action that failed, for the message, such as `exporting to '/x'`.

    Raises:
        RunError: the failed rank raises its own error, the others name another rank.
    """
    failed = on_any_rank(error is not None)
    if error is not None:
        raise RunError(f"{action} failed: {error}") from error
    if failed:
        raise RunError(f"{action} failed on another rank; see that rank's error")
