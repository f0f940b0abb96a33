"""What a model's folder says of it, read without torch: its config.json and the headers of its safetensors."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LONGEST_HEADER: Final = 1 << 28


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder's safetensors, from the files' headers.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read, or is none.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > LONGEST_HEADER:
                raise ValueError(f"{file.name} is not a safetensors file")
            header: dict[str, Any] = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        needed = 8 + size + max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        if (found := file.stat().st_size) != needed:
            raise ValueError(f"{file.name} has {found} bytes, and by its header it should have {needed}")
        shapes |= {name: tuple(map(operator.index, tensor["shape"])) for name, tensor in header.items()}
    _check_index(folder, shapes)
    return shapes


def _check_index(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` where an index is none, or names files or tensors that are not there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():  # which is read first
        return
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{index.name} is not an index: {type(error).__name__}: {error}") from error
    missing = sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()})
    if missing:
        raise ValueError(f"{index.name} names files that are missing: {', '.join(missing[:3])}")
    if absent := sorted(places.keys() - shapes.keys()):
        raise ValueError(f"{index.name} names tensors that no file holds: {', '.join(absent[:3])}")
