"""What an adapter's file says of itself, by its header alone. Imports no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PART = re.compile(r".*?\.(\d+\..+)\.lora_([AB])\.weight")
"""Of PEFT's names: the matrix from its layer on, for what stands before that differs between files, and which part."""
_MATRIX = re.compile(r".*?\.(\d+\..+)\.weight")
_FLOATING = re.compile("BF16|F16|F32|F64")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors, by their names in PEFT's file.

    Raises:
        RunError: the file cannot be read, is not whole, or holds something else than floating-point numbers.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is not a file")
        with safe_open(path, "np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
            odd = [name for name, part in found.items() if not _FLOATING.fullmatch(part.get_dtype())]
            message = f"'{odd[0]}' is {found[odd[0]].get_dtype()}, and no floating-point number" if odd else ""
    except (OSError, SafetensorError) as error:
        message = str(error)
    if message:
        raise RunError(
            f"the adapter '{path}' cannot be read: {message}",
            hints=[f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as PEFT and exports write it"],
        )
    return shapes


def refuse_misfit(folder: Path, rank: int, matrices: Mapping[str, tuple[int, ...]]) -> None:
    """Compare an adapter's file with the matrices that it is for.

    Args:
        folder: of the adapter.
        rank: that its config says.
        matrices: shapes of those that it shall sit on, by their names in the model's files.

    Raises:
        RunError: it cannot be read, or is another model's or of another rank.
    """
    shapes = read_shapes(folder)
    places = {name: _PART.fullmatch(name) for name in shapes}
    found = {(place[1], place[2]): shapes[name] for name, place in places.items() if place}
    for name, (rows, columns) in matrices.items():
        place = _MATRIX.fullmatch(name)
        assert place is not None
        own = tuple(found.pop((place[1], part), None) for part in "AB")
        fitting = ((rank, columns), (rows, rank)), ((rank, rows), (columns, rank))  # GPT-2's are stored transposed
        if own not in fitting:
            message = " and ".join(str(shape or "none") for shape in own)
            raise _misfit(
                folder, f"for '{name}' A and B must be {fitting[0][0]} and {fitting[0][1]}, and are {message}"
            )
    strange = [name for name, place in places.items() if (place and (place[1], place[2]) in found)]
    strange += [name for name, place in places.items() if not place and "lora_" in name]  # the others are of a head
    if strange:
        raise _misfit(folder, f"it has '{strange[0]}', and the model no such matrix")


def _misfit(folder: Path, how: str) -> RunError:
    return RunError(
        f"the adapter '{folder / ADAPTER_WEIGHTS}' does not fit the model: {how}",
        hints=[
            "adapter.from_folder must be of the same base model, as its base_model_name_or_path says, and of the rank "
            f"that its {ADAPTER_CONFIG} says"
        ],
    )
