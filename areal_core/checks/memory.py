"""Results of checks in the cache folder, each valid until something that it depends on changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from areal_core.checks.installed import is_installed
from areal_core.config import public_environment
from areal_core.disk import open_private
from areal_core.files import KeptSources
from areal_core.runtime.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_RESULTS: Final = 16
"""Results of each check that are stored. A stored file has about 300 KB: it names every module that was imported."""
_LARGEST_HASHED: Final = 1 << 20
"""Bytes. A larger file, such as one with weights, is compared by its size and time stamp."""
_OF_TERMINALS: Final = re.compile(
    r"_|SHLVL|OLDPWD|COLUMNS|LINES|STY|WINDOW(ID)?|GPG_TTY|(TERM_|SSH_|TMUX|XDG_SESSION_)\w*"
)
"""Names of variables that differ from one terminal or shell to the next, and say nothing about a run."""


class Memory:
    """The result of one check of one config.

    It holds for one machine, environment and current folder, for the same names in the folders of `sys.path` (a package
    that is installed adds one), and as long as no file that was read has changed.

    Args:
        check: name of the check.
        text: the config.
        environment: variables that the check depends on, besides those that are public.
    """

    def __init__(self, check: str, text: str, environment: Iterable[tuple[str, str]] = ()) -> None:
        names = [_names(Path(folder)) for folder in sys.path]
        given = {*public_environment(text).items(), *environment}
        variables = sorted((name, value) for name, value in given if not _OF_TERMINALS.fullmatch(name))
        sources = str(KeptSources.folder)
        key = [text, platform.node(), sys.prefix, sys.path, names, variables, str(Path.cwd()), sources]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        self._path = cache_folder() / "checked" / check / f"{digest}.msgpack"

    def read(self) -> Any:
        """Return the result as plain data; None if the check must be repeated."""
        with suppress(OSError, msgspec.DecodeError):
            stored = msgspec.msgpack.decode(self._path.read_bytes(), type=_Stored)
            if stored.states == _states(map(Path, stored.states)):
                return stored.result
        return None

    def write(self, result: Any, files: Iterable[Path]) -> None:
        """Store a result, and remove the oldest results of other configs.

        If the cache folder cannot be written to, the next process repeats the check.

        Args:
            result: plain data, dataclasses, and msgspec's structs.
            files: files and folders that the check depends on.
        """
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            fresh.parent.mkdir(parents=True, exist_ok=True)
            with open_private(fresh, "wb") as file:  # settings may hold what other users must not read
                file.write(msgspec.msgpack.encode(_Stored(_states(files), result)))
            fresh.replace(self._path)
            stored = sorted(fresh.parent.glob("*.msgpack"), key=lambda path: path.stat().st_mtime_ns)
            for path in stored[:-MOST_RESULTS]:
                path.unlink()


class _Stored(msgspec.Struct):
    """What `Memory` writes: the state of each file or folder, and the result."""

    states: dict[str, str]
    result: Any


def imported_files() -> list[Path]:
    """Return the files of all modules that this process has imported."""
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    return [path for path in files if path.is_file()]


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it is not a folder or cannot be read.

    Programs add caches while they run: Python `__pycache__`, and others hidden folders, which no import looks into.
    """
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__" and path.name[0] != ".")
    return []


def _states(paths: Iterable[Path]) -> dict[str, str]:
    return {str(path): _state(path) for path in paths}


def _state(path: Path) -> str:
    """Return the names in a folder, the hash of a file of the user's own, or the size and time stamp of another."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    if stat.S_ISDIR(status.st_mode):
        return hashlib.sha256("/".join(_names(path)).encode(errors="surrogateescape")).hexdigest()
    if is_installed(path) or status.st_size > _LARGEST_HASHED or not stat.S_ISREG(status.st_mode):
        return f"{status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
