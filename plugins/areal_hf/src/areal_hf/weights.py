"""Taking over published weights: all of them, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

SHOWN = 5


class WeightMismatch(ValueError):  # noqa: N818 - says what it is
    """The file cannot be read or does not fit the model; the model is as it was."""


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy `model.safetensors` into the model's parameters, after every name and shape has been compared.

    Raises:
        WeightMismatch: names or shapes differ, or the file is not whole.
    """
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightMismatch(f"{path} cannot be read: {error}") from error
    parameters = dict(model.named_parameters())  # a tied parameter has one name here, as in the file
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    missing = sorted(parameters.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - parameters.keys() - tied)
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(value.shape)}"
        for name, value in parameters.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    faults = [("missing", missing), ("unexpected", unexpected), ("of another shape", wrong)]
    told = [f"{len(names)} {what}: {', '.join(names[:SHOWN])}" for what, names in faults if names]
    if told:
        raise WeightMismatch(f"{path} does not fit the model: {'; '.join(told)}")
    for name, value in parameters.items():
        value.copy_(tensors[name])
