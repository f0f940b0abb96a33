"""Checkpoints that any number of ranks can load, and the Hugging Face folder of a model."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoTokenizer

from areal_core.errors import RunError
from areal_fsdp.ranks import fail_together, rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from areal_core.interfaces import ModelReference


def checkpoint_state(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, updates: torch.Tensor
) -> dict[str, Any]:
    """Everything that a resumed engine needs, as tensors that share memory with the engine's own.

    Args:
        parameters: by name, plain or sharded.
        optimizer: None for a frozen role.
        updates: [] int64, how many were applied: the state of the schedule.
    """
    state: dict[str, Any] = {"parameters": dict(parameters), "updates": updates}
    if optimizer is not None:
        state["optimizer"] = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
    return state


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` and each rank's random state; collective.

    Raises:
        RunError: the folder cannot be written.
    """
    rank, _ = rank_and_ranks()
    try:
        with _alone() as alone:
            save({**state, "random": {str(rank): _random_state()}}, checkpoint_id=folder, no_dist=alone)
    except (CheckpointException, OSError) as error:
        raise RunError(f"the checkpoint '{folder}' cannot be written: {error}") from error


def read_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` and set the random state; collective.

    A rank that the checkpoint does not know, because there were fewer, keeps its random state.

    Raises:
        RunError: there is no checkpoint, or it is of another model or role.
    """
    rank, _ = rank_and_ranks()
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        random = _random_state()
        whole = {**state, "random": {str(rank): random}} if f"random.{rank}.cpu" in known else state
        with _alone() as alone:
            load(whole, checkpoint_id=folder, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"the checkpoint '{folder}' cannot be loaded: {error}",
            hints=["it must be a folder that `save` of the same model and role has finished"],
        ) from error
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


@contextmanager
def _alone() -> Iterator[bool]:
    """Whether there is no process group, which PyTorch would warn of each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield not dist.is_initialized()


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def write_model(
    folder: Path,
    model: PreTrainedModel,
    reference: ModelReference,
    parameters: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write a Hugging Face folder; collective.

    Args:
        folder: its place.
        model: for config and names; its own parameters are not read.
        reference: where the model came from, for its tokenizer and dtype.
        parameters: as of `named_full_parameters`; every rank exhausts it, rank 0 keeps it.

    Raises:
        RunError: it cannot be written.
    """
    rank, _ = rank_and_ranks()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in parameters:
        if rank == 0:
            weights[name] = tensor.to("cpu", copy=True)
    failure: Exception | None = None
    if rank == 0:
        try:
            model.save_pretrained(folder, state_dict=weights)
            model.config.dtype = reference.dtype  # the weights', while the model in memory may be in float32
            model.config.save_pretrained(folder)
            _copy_tokenizer(reference, folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
            failure = error
    fail_together(failure, f"exporting the model to '{folder}'")


def _copy_tokenizer(reference: ModelReference, folder: Path) -> None:
    """Write the source's tokenizer, where it has one."""
    source = Path(reference.path)
    if source.is_dir() and not any(source.glob("tokenizer*")) and not (source / "vocab.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(reference.path, trust_remote_code=reference.trust_remote_code)
    tokenizer.save_pretrained(folder)
