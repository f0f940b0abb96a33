"""The GPUs of this machine: how many, which ones a process sees, and their memory. Imports no torch."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of the machine, where NVIDIA's driver runs."""
_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-.+")
_ANSWER_S = 10.0
"""Seconds that nvidia-smi may take."""


def visible_gpus() -> list[str] | None:
    """Return the names of the GPUs that `CUDA_VISIBLE_DEVICES` shows; None if it is not set, which shows all.

    CUDA reads numbers, UUIDs and MIG names up to the first entry that is none of them, such as `-1`, or that is a
    number beyond the GPUs of the machine. It shows no GPU if a name occurs twice.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    there = len(list(GPUS.glob("*"))) or sys.maxsize  # where the machine does not say, every number counts

    def is_shown(name: str) -> bool:
        return bool(_GPU_NAME.fullmatch(name)) and not (name.isdigit() and int(name) >= there)

    shown = list(itertools.takewhile(is_shown, map(str.strip, value.split(","))))
    return shown if len(set(shown)) == len(shown) else []


def count_gpus() -> int:
    """Return the number of GPUs that a process of this environment sees; 0 also if the machine does not list its GPUs.

    It reads `CUDA_VISIBLE_DEVICES` and the folders of NVIDIA's driver, and does not initialize CUDA.

    Example:
        >>> import os
        >>> from unittest.mock import patch
        >>> from areal_core.processes import count_gpus, has_nvidia_driver
        >>> with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"):  # hides all GPUs
        ...     device = "cuda" if count_gpus() and has_nvidia_driver() else "cpu"
        >>> device
        'cpu'
    """
    shown = visible_gpus()
    return len(list(GPUS.glob("*")) if shown is None else shown)


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver lists GPUs on this machine, whatever this process sees of them."""
    return any(GPUS.glob("*"))


def gpu_variables(numbers: Sequence[int]) -> dict[str, str]:
    """Return the environment variable with which a program sees only these GPUs.

    Args:
        numbers: of GPUs among those that this process sees, from 0.

    Raises:
        RunError: there is no such GPU.
    """
    shown = visible_gpus()
    if shown is not None and (missing := [number for number in numbers if number >= len(shown)]):
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        raise RunError(
            f"GPU {missing[0]} is not among the {len(shown)} that CUDA_VISIBLE_DEVICES={value} shows, numbered from 0"
        )
    names = map(str, numbers) if shown is None else (shown[number] for number in numbers)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def show_gpus(numbers: Sequence[int]) -> None:
    """Let this process and what it starts see only these GPUs; see `gpu_variables`."""
    os.environ.update(gpu_variables(numbers))


def gpu_bytes(numbers: Sequence[int] = ()) -> int | None:
    """Return the memory of the smallest of these GPUs, or of all if this process sees none of them.

    Args:
        numbers: of GPUs among those that this process sees, from 0.

    Returns:
        Bytes; None if nvidia-smi does not answer.
    """
    shown, program = visible_gpus(), shutil.which("nvidia-smi")
    if shown == [] or program is None:
        return None
    command = [program, "--query-gpu=memory.total,index,uuid", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
        lines = [line.split(", ") for line in answer.splitlines()]
        gpus = [(int(size) << 20, index, uuid) for size, index, uuid in lines]  # sizes are in MiB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    names = [index for _, index, _ in gpus] if shown is None else shown
    sizes = [size for name in names for size, index, uuid in gpus if name == index or uuid.startswith(name)]
    named = [sizes[number] for number in numbers if number < len(sizes)]  # a server may see its own GPU alone
    return min(named or sizes, default=None)
