"""Checkpoints in DeepSpeed's own format, and beside them what it does not keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TAG = "zero"


class Checkpoint:
    """A checkpoint's folder: `rankR.pt` of each rank, and DeepSpeed's files, or `average.pt` of an EMA role.

    DeepSpeed keeps what each rank has of the optimizer, so that as many ranks must load it.

    Args:
        folder: its place.
        stage: of ZeRO.
    """

    def __init__(self, folder: Path, *, stage: int) -> None:
        self._folder = folder
        self._rank, self._ranks = rank_and_ranks()
        self._layout = {"ranks": self._ranks, "stage": stage}

    def write(self, zero: Any, average: Mapping[str, torch.Tensor], updates: int) -> None:
        """Write everything that a resumed engine needs; collective.

        Args:
            zero: DeepSpeed's engine, None where the role has none.
            average: float32 parameters of an EMA role, by name.
            updates: how many were applied.

        Raises:
            RunError: the folder cannot be written.
        """
        failure: Exception | None = None
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save({**self._layout, "updates": updates, "random": random}, self._own_file(self._rank))
            if average and self._rank == 0:
                torch.save(dict(average), self._folder / "average.pt")
        except (OSError, RuntimeError) as error:
            failure = error
        fail_together(failure, f"writing the checkpoint '{self._folder}'")
        if zero is not None:
            try:
                zero.save_checkpoint(str(self._folder), tag=_TAG, save_latest=False)
            except (OSError, RuntimeError) as error:
                failure = error
            fail_together(failure, f"writing the checkpoint '{self._folder}'")

    def read(self, zero: Any, average: Mapping[str, torch.Tensor]) -> int:
        """Restore what `write` wrote, and this rank's random state; collective.

        Returns:
            The updates that were applied.

        Raises:
            RunError: there is no checkpoint, it is damaged, or of another number of ranks or another stage.
        """
        failure: Exception | None = None
        own: dict[str, Any] = {}
        try:
            own = self._read_own()
            if average:
                kept = torch.load(self._folder / "average.pt", weights_only=True, map_location="cpu")
                for name, tensor in average.items():
                    tensor.copy_(kept[name])
        except Exception as error:  # noqa: BLE001 - whatever unpickling a damaged file may raise
            failure = error
        fail_together(failure, f"loading the checkpoint '{self._folder}'")
        if zero is not None:
            try:
                found, _ = zero.load_checkpoint(str(self._folder), tag=_TAG)
                if found is None:
                    failure = FileNotFoundError("DeepSpeed finds none of its files there")
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
            fail_together(failure, f"loading the checkpoint '{self._folder}'")
        torch.set_rng_state(own["random"]["cpu"])
        if "cuda" in own["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["random"]["cuda"])
        return int(own["updates"])

    def _own_file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.pt"

    def _read_own(self) -> dict[str, Any]:
        """This rank's file.

        Raises:
            RunError: it was written by another number of ranks, or at another stage.
        """
        path = self._own_file(self._rank if self._own_file(self._rank).exists() else 0)
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        for name, value in self._layout.items():
            if found[name] != value:
                setting = {"ranks": "launcher.trainer_processes", "stage": "zero_optimization.stage"}[name]
                raise RunError(
                    f"it was written with {setting} {found[name]}, and this run has {value}; DeepSpeed's checkpoints "
                    f"hold what each rank had. Go on with {setting} {found[name]}, or begin a run from its export"
                )
        return found
