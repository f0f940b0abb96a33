"""Tells files of installed distributions from the user's own."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

_FOLDERS: Final = {"site-packages", "dist-packages"}


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to Python or to an installed distribution, also one of `pip install --target`.

    The files of a package that `pip install -e` has installed are the user's own: they change between two runs.

    Args:
        path: absolute path of a module's file.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from areal_core.checks.installed import is_installed
        >>> is_installed(Path(torch.__file__))
        True
    """
    if _FOLDERS & {*path.parts} or path.is_relative_to(sysconfig.get_path("stdlib")):
        return True
    folders = [folder for folder in map(Path, sys.path) if path.is_relative_to(folder)]
    return any(path.relative_to(folder).parts[0] in _installed_names(folder) for folder in folders)


@cache
def _installed_names(folder: Path) -> frozenset[str]:
    """Return the names in a folder that distributions have installed there, by their lists of files."""
    names = set()
    for record in folder.glob("*.dist-info/RECORD"):
        lines = record.read_text(errors="replace").splitlines()
        names |= {line.strip('"').partition(",")[0].partition("/")[0] for line in lines}
    return frozenset(names - {".."})
