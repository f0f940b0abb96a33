"""Writes synced weights into one safetensors file, tensor by tensor, without a second copy of the model."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final

import torch

from areal_core.interfaces.inference import TensorDescription
from areal_core.interfaces.training import DescribingEngine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from areal_core.interfaces.training import TrainEngine

_NAMES: Final = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT: Final = 8


_last: tuple[TrainEngine, tuple[TensorDescription, ...]] | None = None
"""A cache with one entry: a transport, and the folder that it falls back to, describe the same engine at each sync."""


def describe_weights(engine: TrainEngine) -> tuple[TensorDescription, ...]:
    """Return names, dtypes and whole shapes of the tensors that an engine syncs, in its order. Collective.

    An engine of an older plugin, without `named_meta_parameters`, gathers all parameters in the first call.
    """
    global _last  # noqa: PLW0603 - see above
    if _last is None or _last[0] is not engine:
        described = engine.named_meta_parameters() if isinstance(engine, DescribingEngine) else None
        named = engine.named_full_parameters() if described is None else described
        _last = engine, tuple(_described(name, value) for name, value in named)
    return _last[1]


def _described(name: str, value: torch.Tensor) -> TensorDescription:
    return TensorDescription(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def size_of(description: TensorDescription) -> int:
    """Return the size of a tensor in bytes."""
    return getattr(torch, description.dtype).itemsize * torch.Size(description.shape).numel()


def write_weights(
    path: Path, descriptions: Sequence[TensorDescription], gathered: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a safetensors file (github.com/huggingface/safetensors, "Format").

    Args:
        path: of the file.
        descriptions: of all tensors.
        gathered: names and values of the tensors, in the same order. Each is released before the next one is gathered.

    Raises:
        ValueError: the tensors are not those of the descriptions.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in descriptions:
        start, end = end, end + size_of(tensor)
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        expected = iter(descriptions)
        for name, value in gathered:
            wanted = next(expected, None)
            found = _described(name, value)
            if found != wanted:
                raise ValueError(f"the engine yielded {found}, expected {wanted}: it must keep the described order")
            copy = value.detach().to("cpu").contiguous()
            file.write(copy.reshape(-1).view(torch.uint8).numpy().data)
            del value, copy
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"the engine did not yield {missing.name}")
