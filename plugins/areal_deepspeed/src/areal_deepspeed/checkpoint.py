"""Checkpoints in DeepSpeed's own format, and beside them what it does not keep."""

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
        folder: its place.
        zero: DeepSpeed's engine, None where the role has none.
        state: as of `areal_fsdp.checkpoint.checkpoint_state`.

    Raises:
        RunError: the folder cannot be written.
    """
    writer_of(state)(folder)
    if zero is not None:
        saving = partial(zero.save_checkpoint, str(folder), tag=_TAG, save_latest=False)
        _together(saving, f"writing the checkpoint '{folder}'")


def read(folder: Path, zero: Any, state: dict[str, Any]) -> None:
    """Restore what `write` wrote; collective. The arguments are the same.

    Raises:
        RunError: there is no checkpoint, it is damaged, or of another number of ranks or another stage of ZeRO.
    """
    written, (_, ranks) = len([*(folder / _TAG).glob("*_optim_states.pt")]), rank_and_ranks()
    if written not in (0, ranks):
        raise RunError(
            f"the checkpoint '{folder}' was written with launcher.trainer_processes={written}, and DeepSpeed loads it "
            f"with as many alone; here it is {ranks}",
            hints=[f"set launcher.trainer_processes to {written}, or train={written} in placement"],
        )
    read_checkpoint(folder, state)
    if zero is not None:
        needs = "which must have been written at the same stage of ZeRO,"
        _together(partial(_load, folder, zero), f"loading the checkpoint '{folder}', {needs}")


def _load(folder: Path, zero: Any) -> None:
    if zero.load_checkpoint(str(folder), tag=_TAG)[0] is None:
        raise FileNotFoundError("DeepSpeed finds none of its files there")


def _together(work: Callable[[], object], what: str) -> None:
    failure: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever unpickling a damaged file may raise
        failure = error
    fail_together(failure, what)
