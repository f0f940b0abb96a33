"""Checks of an adapter's file that read only its header. Imports no torch."""

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
"""PEFT's name of A or B: group 1 is the matrix from its layer number on, because prefixes differ between files."""
_MATRIX = re.compile(r".*?\.(\d+\..+)\.weight")
_FLOATING = re.compile("BF16|F16|F32|F64")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, by their names in PEFT's file.

    Raises:
        RunError: the file cannot be read, is truncated, or holds tensors that are not floating-point.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise OSError("it is not a file")
        with safe_open(path, "np") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
            dtypes = {name: tensor.get_dtype() for name, tensor in tensors.items()}
            wrong = [f"'{name}' is {dtype}" for name, dtype in dtypes.items() if not _FLOATING.fullmatch(dtype)]
            problem = f"{wrong[0]}, not floating-point" if wrong else ""
    except (OSError, SafetensorError) as error:
        problem = str(error)
    if problem:
        raise RunError(
            f"the adapter '{path}' cannot be read: {problem}",
            hints=[f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as PEFT and exports write it"],
        )
    return shapes


def refuse_misfit(folder: Path, rank: int, matrices: Mapping[str, tuple[int, ...]]) -> None:
    """Compare an adapter's file with the matrices that it adapts.

    Args:
        folder: the adapter's folder.
        rank: rank in the adapter's config.
        matrices: shapes of the matrices that get the adapter, by their names in the model's files.

    Raises:
        RunError: the file cannot be read, belongs to another model, or has another rank.
    """
    shapes = read_shapes(folder)
    parsed = {name: _PART.fullmatch(name) for name in shapes}
    unused = {(match[1], match[2]): shapes[name] for name, match in parsed.items() if match}
    for name, (rows, columns) in matrices.items():
        matrix = _MATRIX.fullmatch(name)
        assert matrix is not None
        stored = tuple(unused.pop((matrix[1], part), None) for part in "AB")
        fitting = ((rank, columns), (rows, rank)), ((rank, rows), (columns, rank))  # GPT-2's are stored transposed
        if stored not in fitting:
            actual = " and ".join(str(shape or "missing") for shape in stored)
            raise _misfit(folder, f"for '{name}' A and B must be {fitting[0][0]} and {fitting[0][1]}, but are {actual}")
    unknown = [name for name, match in parsed.items() if match and (match[1], match[2]) in unused]
    unknown += [name for name, match in parsed.items() if not match and "lora_" in name]  # the others are a head's
    if unknown:
        raise _misfit(folder, f"it has '{unknown[0]}', but the model has no such matrix")


def _misfit(folder: Path, problem: str) -> RunError:
    return RunError(
        f"the adapter '{folder / ADAPTER_WEIGHTS}' does not fit the model: {problem}",
        hints=[
            "adapter.from_folder must be trained on the same base model (see its base_model_name_or_path), with the "
            f"rank that {ADAPTER_CONFIG} names"
        ],
    )
