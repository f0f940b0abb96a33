"""Synced weights in one safetensors file, written tensor by tensor: of the model there is never a second copy."""

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

_NAMES: Final = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT: Final = 8


_last: tuple[TrainEngine, torch.dtype, tuple[TensorDescription, ...]] | None = None
"""A cache of one: the transport and the folder that it falls back to describe the same engine at each sync."""


def describe_weights(engine: TrainEngine, dtype: torch.dtype) -> tuple[TensorDescription, ...]:
    """Names and whole shapes of what an engine syncs, in its order.

    Collective. The first call gathers all parameters once if the engine is no `DescribingEngine`.
    """
    global _last  # noqa: PLW0603 - see above
    if _last is None or _last[0] is not engine or _last[1] != dtype:
        described = engine.named_meta_parameters() if isinstance(engine, DescribingEngine) else None
        named = engine.named_full_parameters() if described is None else described
        word = str(dtype).removeprefix("torch.")
        _last = engine, dtype, tuple(TensorDescription(name, word, tuple(value.shape)) for name, value in named)
    return _last[2]


def size_of(description: TensorDescription) -> int:
    """Bytes of one tensor."""
    return getattr(torch, description.dtype).itemsize * torch.Size(description.shape).numel()


def write_weights(
    path: Path, descriptions: Sequence[TensorDescription], gathered: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a safetensors file (github.com/huggingface/safetensors, "Format").

    Args:
        path: of the file.
        descriptions: of all tensors.
        gathered: these, in the same order; each is let go before the next is asked for.

    Raises:
        ValueError: they are others than described.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in descriptions:
        start, end = end, end + size_of(one)
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        left = iter(descriptions)
        for name, value in gathered:
            wanted = next(left, None)
            if wanted is None or (wanted.name, wanted.shape) != (name, tuple(value.shape)):
                raise ValueError(f"the engine gave {name} {tuple(value.shape)} where {wanted} was to come")
            own = value.detach().to("cpu", getattr(torch, wanted.dtype)).contiguous()
            file.write(own.reshape(-1).view(torch.uint8).numpy().data)
            del value, own
        if (missing := next(left, None)) is not None:
            raise ValueError(f"the engine gave no {missing.name}")
