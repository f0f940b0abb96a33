"""Checks of a folder of weights before any server is stopped for it: complete, and of the model that is served."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from areal_core.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.interfaces.inference import TensorDescription

_SHOWN = 3
_LARGEST_HEADER = 1 << 28


def describe_folder(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the safetensors files of a folder.

    Raises:
        RunError: there are none, or one of them is not complete.
    """
    found: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise RunError(f"there are no weights in {folder}: it holds no *.safetensors")
    for path in files:
        found |= _describe_file(path)
    return found


def _describe_file(path: Path) -> dict[str, tuple[int, ...]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER + 1
        text = file.read(length) if length <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RunError(f"the weights in {path} cannot be read: it is no safetensors file, or was cut off") from None
    if size != 8 + length + end:
        raise RunError(f"the weights in {path} are not complete: {size:,} bytes of {8 + length + end:,}")
    return shapes


def check_fit(
    found: dict[str, tuple[int, ...]] | tuple[TensorDescription, ...], model: dict[str, tuple[int, ...]]
) -> None:
    """Whether weights are those of a model.

    Tied tensors are in a file once: a head that is missing on one side only is no fault.

    Raises:
        RunError: tensors are missing, of another shape, or of another model.
    """
    shapes = found if isinstance(found, dict) else {tensor.name: tensor.shape for tensor in found}
    tied = {name for name in shapes.keys() ^ model.keys() if name.endswith("lm_head.weight")}
    faults = {
        "missing": sorted(model.keys() - shapes.keys() - tied),
        "unexpected": sorted(shapes.keys() - model.keys() - tied),
        "of another shape": sorted(n for n in shapes.keys() & model.keys() if tuple(shapes[n]) != tuple(model[n])),
    }
    told = [
        f"{fault}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for fault, names in faults.items()
        if names
    ]
    if told:
        raise RunError(f"the weights do not fit the model that is served; {'; '.join(told)}")
