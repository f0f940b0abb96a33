"""Checkpoints that any number of ranks can load."""

from __future__ import annotations

from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from areal_core.errors import RunError
from areal_fsdp.parallel.ranks import rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def checkpoint_state(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, updates: torch.Tensor
) -> dict[str, Any]:
    """Everything that a resumed engine needs, as tensors that share memory with the engine's own; and this rank's
    random state, by its number.

    Args:
        parameters: by name, plain or sharded.
        optimizer: None for a frozen role.
        updates: [] int64, number of updates, those that changed nothing included: the state of the schedule.
    """
    random = {str(rank_and_ranks()[0]): _random_state()}
    state: dict[str, Any] = {"parameters": dict(parameters), "updates": updates, "random": random}
    if optimizer is not None:
        state["optimizer"] = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
    return state


def copy_to_host(state: dict[str, Any], former: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of this rank's part of `state`; in the memory of `former`, if not None.

    The memory is not pinned: PyTorch would round each tensor's up to a power of two, nearly twice as much in all.
    """
    if former is None:
        former = tree_map(lambda value: value.to("cpu", copy=True), state)
    else:
        tree_map(lambda held, value: held.copy_(value), former, state)
    return former


def size_of(state: dict[str, Any]) -> int:
    """Bytes of this rank's part of `state`."""
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tree_leaves(state))


@cache
def group_beside(ranks: object) -> Any:
    """A group in which nobody but the threads that write checkpoints meet; collective the first time.

    Disks are slow: who waits for a checkpoint has a clock, and no other one shall end it earlier.

    Args:
        ranks: the group of all.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=365))


def writer_of(state: dict[str, Any]) -> Callable[[Path], None]:
    """What writes `state` below a folder, from any thread, on all ranks; collective, and collective when called."""
    return partial(write_checkpoint, state=state, group=group_beside(dist.group.WORLD))


def write_checkpoint(folder: Path, state: dict[str, Any], group: Any = None) -> None:
    """Write `state`; collective in `group`, None for that of all ranks.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        # Ahead of its writing it would copy on a stream of the thread's device, which need not be the rank's.
        save(state, storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0), process_group=group)
    except CheckpointException as error:
        causes = {str(cause) for cause, _ in error.failures.values()}
        raise RunError(f"the checkpoint '{folder}' cannot be written: {'; '.join(sorted(causes))}") from error
    except OSError as error:
        raise RunError(f"the checkpoint '{folder}' cannot be written: {error}") from error


def read_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` and set this rank's random state; collective.

    A rank that the checkpoint does not know, because there were fewer, keeps its random state.

    Raises:
        RunError: there is no checkpoint, or it is of another model or role.
    """
    rank, _ = rank_and_ranks()
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        random = state["random"][str(rank)]
        if f"random.{rank}.cpu" not in known:
            del state["random"]
        load(state, checkpoint_id=folder)
    except (CheckpointException, Exception) as error:  # whatever unpickling a damaged file may raise
        causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        told = sorted({str(cause).partition("\n")[0] for cause, _ in causes})  # torch's go on for a screen
        raise RunError(
            f"the checkpoint '{folder}' cannot be loaded: {'; '.join(told)}",
            hints=["it must be a folder that `save` of the same model and role has finished"],
        ) from error
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state
