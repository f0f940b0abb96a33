"""The check of a model for `areal doctor MODEL`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.engines import ModelReference
from areal_core.models import try_dtypes
from areal_hf.server import load_model
from areal_hf.ways import Way, choose_way

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.models import Dtype
    from areal_core.plugins import Finding


def check_generate(folder: Path) -> Finding:
    """Report in which way the embedded engine generates in each dtype, and why not in a faster one."""
    return try_dtypes(folder, _way)


def _way(path: Path, dtype: Dtype) -> tuple[bool, str]:
    choice = choose_way(load_model(ModelReference(str(path), dtype), "cpu"))
    return choice.way is not Way.REFUSED, str(choice.way) + (f", because {choice.reason}" if choice.reason else "")
