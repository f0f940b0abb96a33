"""How new weights reach the servers: by a `WeightTransport`, and through a folder that they read where it fails."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.prediction import shift_to_predictions
from areal_core.disk import writing
from areal_core.errors import RunError
from areal_core.interfaces.transport import TransferFailedError
from areal_core.messages.rollouts import (
    Begin,
    LogprobCheck,
    OfferFolder,
    SkipSync,
    Sleep,
    Synced,
    SyncWeights,
)
from areal_core.training.distribution import share_bytes, wait_for_all
from areal_core.training.weights_file import describe_weights, size_of, write_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from areal_core.config.sections import WeightSyncSection
    from areal_core.interfaces.inference import TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.interfaces.transport import WeightTransport
    from areal_core.training.rollouts import RolloutClient

LARGEST = 5.0
"""Tolerances that one token may count for in the log-probability check."""
KEPT = 2
"""Folders of synced weights; the one before the last may still be read by a server that catches up."""


def roomy_folder(folders: Sequence[Path], size: int) -> Path:
    """The first folder with room for so many bytes; told, where it is another one than the first.

    Raises:
        RunError: none has room.
    """
    told: list[str] = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free > size:
            if told:
                sys.stderr.write(f"weights of {size / 1e9:.1f} GB go to {folder}: only {', '.join(told)}\n")
            return folder
        told.append(f"{free / 1e9:.1f} GB are free in {folder}")
    raise RunError(
        f"there is no room for weights of {size / 1e9:.1f} GB: only {', '.join(told)}",
        hints=["make room there, or set weight_sync.transport to disk or broadcast"],
    )


class Folder:
    """Stands for a `WeightTransport` where there is none: all goes through the folder that stands behind the others."""


class WeightSync:
    """Syncs an engine's parameters; every rank of the trainer takes part.

    A folder in `/dev/shm` is for one host, one that all hosts see for several.

    Args:
        section: settings.
        engine: whose parameters.
        rollouts: the controller's end, on rank 0; None on other ranks.
        transport: sends them; a `Folder` where none does.
        folders: where versions are written, one folder each: in the first one that has room.
        dtype: of the synced weights.
    """

    def __init__(
        self,
        section: WeightSyncSection,
        engine: TrainEngine,
        rollouts: RolloutClient | None,
        transport: WeightTransport | Folder,
        folders: Sequence[Path],
        dtype: torch.dtype,
    ) -> None:
        self._section = section
        self._engine = engine
        self._rollouts = rollouts
        self._folders = folders
        self._dtype = dtype
        self._transport = transport
        self._written: list[Path] = []
        self._pending: Future[Any] | None = None
        self._count = 0
        self.version = 0
        """Of the weights that were synced last."""

    def begin(self, version: int, trained: int) -> None:
        """Generation may begin, with the engine's parameters as `version`; 0 where the engines have the same already.

        On return the first requests are made, under these weights.
        """
        self.version = version
        if version:
            self._sync_folder(version, trained)
            self.finish()
        if self._rollouts is not None:
            self._rollouts.call(Begin())

    def sync(self, trained: int) -> int:
        """Sync the parameters, which were trained on so many batches, as the next version; its number.

        Returns when they are on their way; the next weight sync, and whatever looks at weights, waits for this one.
        """
        self.finish()
        self.version += 1
        self._count += 1
        if isinstance(self._transport, Folder):
            self._sync_folder(self.version, trained)
            return self.version
        try:
            needs_folder = self._transport.send(self.version, trained)
        except TransferFailedError:
            self._sync_folder(self.version, trained)
        else:
            if needs_folder:
                folder = self._write(self.version)
                if self._rollouts is not None:
                    self._rollouts.call(OfferFolder(self.version, folder))
        return self.version

    def close(self) -> None:
        """Remove what was written: nobody reads it any more."""
        while self._written:
            shutil.rmtree(self._written.pop(), ignore_errors=True)

    def keep(self, trained: int) -> None:
        """The parameters, after so many batches, are still those that were synced last."""
        self.finish()
        if self._rollouts is not None:
            self._rollouts.call(SkipSync(trained))

    def finish(self) -> None:
        """Wait until the engines generate with what was synced last."""
        number, self._pending = self._pending, None
        if number is not None and self._rollouts is not None:
            answer = self._rollouts.wait(number)
            assert isinstance(answer, Synced)

    def sleep(self) -> None:
        """The inference engines leave their memory to the trainer; no rank goes on before they have."""
        self.finish()
        if self._rollouts is not None:
            self._rollouts.call(Sleep())
        wait_for_all()

    def check_logprobs(self, tolerance: float) -> dict[str, float]:
        """Compare the engines' log-probabilities with the trainer's: after the first weight sync, then now and then.

        What counts is the mean over the tokens of each copy of the weights, where no token counts for more than
        `LARGEST` tolerances: in bfloat16 single tokens of a healthy server differ by 2 nats.

        Args:
            tolerance: for the largest of these means, where the config says none.

        Raises:
            RunError: the engines do not hold the weights that were synced.
        """
        every, limit = self._section.logprob_check_every, self._section.logprob_tolerance or tolerance
        if self._count > 1 and (not every or self._count % every):
            return {}
        self.finish()
        packed = b""
        if self._rollouts is not None:
            packed = self._rollouts.call(LogprobCheck()).packed
        batch = shift_to_predictions(PackedBatch.from_bytes(share_bytes(packed)))
        computed = self._engine.forward(batch, ["logprobs"])["logprobs"]
        counts = batch["loss_mask"]
        gaps = (batch["logprobs"] - computed).abs()[counts]
        clipped, copy = gaps.clamp(max=LARGEST * limit), batch["copy"][counts]
        worst = float(torch.stack([clipped[copy == one].mean() for one in set(copy.tolist())]).max())
        if not worst <= limit:
            raise RunError(
                f"the inference engine does not hold the weights that were synced: its log-probabilities differ by "
                f"{worst:.4f} on average from the trainer's (weight_sync.logprob_tolerance is {limit:g})",
                hints=["look at its log for parameters that it did not take over; a wrong dtype shows like this too"],
            )
        return {
            "logprob_check/difference_clipped": worst,
            "logprob_check/difference_mean": float(gaps.mean()),
            "logprob_check/difference_p99": float(gaps.quantile(0.99)),
            "logprob_check/difference_max": float(gaps.max()),
        }

    def _sync_folder(self, version: int, trained: int) -> None:
        folder = self._write(version)
        if self._rollouts is not None:
            self._pending = self._rollouts.request(SyncWeights(version, trained, folder))

    def _write(self, version: int) -> Path:
        """Write the parameters to a folder, complete or not at all; only rank 0 writes."""
        tensors = describe_weights(self._engine, self._dtype)
        gathered = self._engine.named_full_parameters()
        try:
            return self._write_to_disk(version, tensors, gathered) if self._rollouts is not None else Path()
        finally:
            for _ in gathered:  # other ranks gather with this one, whatever became of the file
                continue

    def _write_to_disk(
        self, version: int, tensors: Sequence[TensorDescription], gathered: Iterator[tuple[str, torch.Tensor]]
    ) -> Path:
        folder = roomy_folder(self._folders, sum(map(size_of, tensors)))
        temporary, target = folder / f".version-{version}", folder / f"version-{version}"
        with writing(f"weights of version {version}", folder):
            temporary.mkdir(parents=True, exist_ok=True)
            write_weights(temporary / "model.safetensors", tensors, gathered)
            temporary.rename(target)
        self._written.append(target)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0))
        return target
