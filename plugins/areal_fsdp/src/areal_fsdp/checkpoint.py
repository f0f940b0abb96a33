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
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path


def checkpoint_state(
    parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], updates: torch.Tensor
) -> dict[str, Any]:
    """Return the state of an engine for a checkpoint, as tensors that share memory with the engine's.

    It has `parameters` and `optimizer` by parameter name, `updates`, and the random states of this rank below its
    number.

    Args:
        parameters: the trained parameters by name, plain or sharded.
        optimizers: none for a frozen role; otherwise they have the state of every parameter.
        updates: [] int64, number of updates including skipped ones: the state of the schedule.
    """
    random = {str(rank_and_ranks()[0]): _random_state()}
    state: dict[str, Any] = {"parameters": dict(parameters), "updates": updates, "random": random}
    if optimizers:
        of_all = {parameter: entries for optimizer in optimizers for parameter, entries in optimizer.state.items()}
        state["optimizer"] = {
            name: {key: part for entry in of_all[parameter].items() for key, part in _plain(*entry)}
            for name, parameter in parameters.items()
        }
    return state


def _plain(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of an optimizer's state by name; of torchao's quantized tensors, yield the plain ones inside.

    Plain tensors are read without torchao's classes, and copied to host memory as they are. The third tensor of a
    quantized one, `qmap`, is a constant.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "codes"):
        yield key, tensor
        return
    for name in ("codes", "scale"):
        part = getattr(local, name)
        if isinstance(tensor, DTensor):  # codes are divided along dimension 0, and so are the blocks' scales, [blocks]
            part = DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False)
        yield f"{key}.{name}", part


def copy_to_host(state: dict[str, Any], former: dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of this rank's part of `state` in host memory; reuse the memory of `former`, if not None.

    The memory is not pinned: PyTorch would round the size of each pinned tensor up to a power of two.
    """
    if former is None:
        former = tree_map(lambda value: value.to("cpu", copy=True), state)
    else:
        tree_map(lambda held, value: held.copy_(value), former, state)
    return former


def size_of(state: dict[str, Any]) -> int:
    """Return the bytes of this rank's part of `state`."""
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tree_leaves(state))


@cache
def group_beside(ranks: object) -> Any:
    """Return the process group of the threads that write checkpoints; collective at the first call.

    Its timeout is effectively infinite, because disks may be slow: the caller has its own timeout.

    Args:
        ranks: the group of all ranks, the cache's key.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=365))


def writer_of(state: dict[str, Any]) -> Callable[[Path], None]:
    """Return a function that writes `state` to a folder, from any thread. Both calls are collective."""
    return partial(write_checkpoint, state=state, group=group_beside(dist.group.WORLD))


def write_checkpoint(folder: Path, state: dict[str, Any], group: Any = None) -> None:
    """Write `state`; collective in `group`, or in the default group for None.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        # Copying ahead would use a stream of the thread's current device, which may not be the rank's.
        save(state, storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0), process_group=group)
    except CheckpointException as error:
        causes = {str(cause) for cause, _ in error.failures.values()}
        raise RunError(f"the checkpoint '{folder}' cannot be written: {'; '.join(sorted(causes))}") from error
    except OSError as error:
        raise RunError(f"the checkpoint '{folder}' cannot be written: {error}") from error


def read_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` and set this rank's random state; collective.

    If the checkpoint was written by fewer ranks, a rank without a saved random state keeps its own.

    Raises:
        RunError: there is no readable checkpoint, or it belongs to another model or role.
    """
    rank, _ = rank_and_ranks()
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        random = state["random"][str(rank)]
        if f"random.{rank}.cpu" not in known:
            del state["random"]
        load(state, checkpoint_id=folder)
    except (CheckpointException, Exception) as error:  # unpickling a damaged file may raise anything
        causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        reasons = sorted({str(cause).partition("\n")[0] for cause, _ in causes})  # torch's messages have many lines
        raise RunError(
            f"the checkpoint '{folder}' cannot be loaded: {'; '.join(reasons)}",
            hints=["use a complete checkpoint of the same model and role"],
        ) from error
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state
