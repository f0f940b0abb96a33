"""Checkpoints in DeepSpeed's format, and the engine's state that DeepSpeed does not store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_fsdp.checkpoint import read_checkpoint, writer_of
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_TAG = "zero"


def write(folder: Path, zero: Any, state: dict[str, Any]) -> None:
    """Write everything that a resumed engine needs; collective.

    Args:
        folder: folder of the checkpoint.
        zero: DeepSpeed's engine, or None if the role has none.
        state: state from `areal_fsdp.checkpoint.checkpoint_state`.

    Raises:
        RunError: the folder cannot be written.
    """
    writer_of(state)(folder)
    if zero is not None:
        saving = partial(zero.save_checkpoint, str(folder), tag=_TAG, save_latest=False)
        _together(saving, f"writing the checkpoint '{folder}'")


def read(folder: Path, zero: Any, state: dict[str, Any]) -> None:
    """Restore what `write` has written; collective. The arguments are those of `write`.

    Raises:
        RunError: there is no checkpoint, it is damaged, or it has another number of ranks or another stage of ZeRO.
    """
    written, (_, ranks) = len([*(folder / _TAG).glob("*_optim_states.pt")]), rank_and_ranks()
    if written not in (0, ranks):
        raise RunError(
            f"the checkpoint '{folder}' was written with launcher.trainer_processes={written}; DeepSpeed needs the "
            f"same number to load it, but here it is {ranks}",
            hints=[f"set launcher.trainer_processes to {written}, or train={written} in placement"],
        )
    read_checkpoint(folder, state)
    if zero is not None:
        needs = "which must have been written at the same stage of ZeRO,"
        _together(partial(_load, folder, zero), f"loading the checkpoint '{folder}', {needs}")


def _load(folder: Path, zero: Any) -> None:
    if zero.load_checkpoint(str(folder), tag=_TAG)[0] is None:
        raise FileNotFoundError("DeepSpeed finds none of its files there")


def _together(call: Callable[[], object], action: str) -> None:
    """Call a function on all ranks; if it fails on one of them, raise an error on all."""
    failure: Exception | None = None
    try:
        call()
    except Exception as error:  # noqa: BLE001 - unpickling a damaged file may raise anything
        failure = error
    fail_together(failure, action)
