"""Loads synced weights into a model: either all of them or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from areal_core.errors import RunError
from areal_core.models import views_by_file_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedModel

_LISTED_NAMES = 5
"""Number of names in an error for each kind of fault. Those of a whole wrong model would be too many."""


class WeightLoader:
    """Copies synced weights into the parameters of a model.

    Names are those of the model's files, even if transformers joins tensors in memory. A tensor that the model has
    under several names (tied weights) may have any of them in the file.

    Args:
        model: the model, whose parameters and persistent buffers are overwritten in place.

    Raises:
        RunError: a tensor of the files does not share memory with the model's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        state = model.state_dict()
        places = {name: place for place, name in enumerate(state)}
        views = views_by_file_name(model, state)
        self._tensors = {name: views[name] for name in sorted(views, key=lambda name: places.get(name, len(places)))}
        self._names: dict[tuple[int, torch.Size], list[str]] = {}
        memory = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        for name, view in self._tensors.items():
            if view.untyped_storage().data_ptr() not in memory:
                raise RunError(
                    f"model type {model.config.model_type}: '{name}' of its files is computed from other tensors of "
                    "the model, so that weights cannot be loaded in place",
                    hints=["set inference_engine to sglang or vllm"],
                )
            self._names.setdefault((view.data_ptr(), view.shape), []).append(name)

    @torch.inference_mode()
    def load(self, folder: Path) -> None:
        """Overwrite all weights with those of the safetensors in `folder`.

        All files are read, and all names and shapes are compared, before the first parameter is overwritten.

        Raises:
            RunError: a file cannot be read, or the tensors do not fit. The model keeps its weights.
        """
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
            try:
                tensors |= load_file(path)
            except (OSError, SafetensorError, ValueError) as error:
                raise RunError(f"the weights in {path} cannot be read: {error}") from None
        missing, chosen = [], {}
        for names in self._names.values():
            present = [name for name in names if name in tensors]
            if present:
                chosen[names[0]] = tensors[present[0]]
            else:
                missing.append(names[0])
        mismatching = [
            f"{name} is {_described(value)}, the model has {_described(self._tensors[name])}"
            for name, value in chosen.items()
            if value.shape != self._tensors[name].shape
            or value.is_floating_point() != self._tensors[name].is_floating_point()
        ]
        faults = (
            _listed("missing", missing),
            _listed("unexpected", tensors.keys() - self._tensors.keys()),
            _listed("mismatching", mismatching),
        )
        message = "; ".join(fault for fault in faults if fault)
        if message:
            raise RunError(f"the weights in {folder} do not fit the model: {message}")
        for name, value in chosen.items():
            self._tensors[name].copy_(value)


def _described(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _listed(fault: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return ""
    rest = f" and {len(ordered) - _LISTED_NAMES} more" if len(ordered) > _LISTED_NAMES else ""
    return f"{fault}: {', '.join(ordered[:_LISTED_NAMES])}{rest}"
