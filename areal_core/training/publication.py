"""Writing weights where inference engines read them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal_core.interfaces.training import TrainEngine

KEPT = 2


class WeightPublisher:
    """Writes the engine's parameters to a folder of safetensors, complete or not at all; the last two are kept.

    In memory-backed storage (`/dev/shm`) this is the shared-memory transport of one host; in a folder that all hosts
    see it is the transport by disk.

    Args:
        engine: whose parameters; every rank publishes together.
        folder: where versions are written, one folder each.
        dtype: of the published weights.
        is_first: whether this is rank 0, which writes.
    """

    def __init__(self, engine: TrainEngine, folder: Path, dtype: torch.dtype, *, is_first: bool) -> None:
        self._engine = engine
        self._folder = folder
        self._dtype = dtype
        self._is_first = is_first
        self._written: list[Path] = []

    def write(self, version: int) -> Path:
        """Write the current parameters as `version`; collective. The folder is complete on return on rank 0."""
        target = self._folder / f"version-{version}"
        parameters: dict[str, torch.Tensor] = {}
        for name, value in self._engine.named_full_parameters():
            if self._is_first:
                parameters[name] = value.detach().to("cpu", self._dtype, copy=True).contiguous()
        if not self._is_first:
            return target
        temporary = self._folder / f".version-{version}"
        temporary.mkdir(parents=True, exist_ok=True)
        save_file(parameters, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(target)
        self._written.append(target)
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0))
        return target
