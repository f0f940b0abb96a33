"""How new weights reach the inference engines: through a folder that they read, or by broadcast (`broadcast.py`)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Protocol

from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal_core.interfaces.source import BatchSource
    from areal_core.interfaces.training import TrainEngine

KEPT = 2


class Publisher(Protocol):
    """Publishes the actor's parameters; every rank of the trainer takes part."""

    def write(self, version: int) -> Path:
        """Write them to a folder, which is returned and complete on rank 0."""
        ...

    def publish(self, version: int, trained: int) -> None:
        """Bring them to the inference engines as `version`, made of `trained` batches."""
        ...


class FolderPublisher:
    """Writes the engine's parameters to a folder of safetensors, complete or not at all; the last two are kept.

    In memory-backed storage (`/dev/shm`) this is the shared-memory transport of one host; in a folder that all hosts
    see it is the transport by disk.

    Args:
        engine: whose parameters; every rank publishes together.
        folder: where versions are written, one folder each.
        dtype: of the published weights.
        source: told of what was written, on rank 0; None on other ranks, which write nothing.
    """

    def __init__(self, engine: TrainEngine, folder: Path, dtype: torch.dtype, source: BatchSource | None) -> None:
        self._engine = engine
        self._folder = folder
        self._dtype = dtype
        self._source = source
        self._written: list[Path] = []

    def write(self, version: int) -> Path:
        """See `Publisher.write`."""
        target = self._folder / f"version-{version}"
        parameters: dict[str, torch.Tensor] = {}
        for name, value in self._engine.named_full_parameters():
            if self._source is not None:
                parameters[name] = value.detach().to("cpu", self._dtype, copy=True).contiguous()
        if self._source is None:
            return target
        temporary = self._folder / f".version-{version}"
        temporary.mkdir(parents=True, exist_ok=True)
        save_file(parameters, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(target)
        self._written.append(target)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0))
        return target

    def publish(self, version: int, trained: int) -> None:
        """See `Publisher.publish`."""
        folder = self.write(version)
        if self._source is not None:
            self._source.publish(version, trained, folder)
