"""Request of a sandbox: command, files and input, validated before anything starts."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_FILES = 256
"""Number of files. Each takes a file descriptor while the command starts, and a process may have about 1000."""
MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_ARGUMENT_BYTES = 255, 1024, 1 << 17
"""Limits of Linux for a file name, a path and an argument, in bytes."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request.

    Attributes:
        command: program and arguments.
        files: contents by relative path.
        input: bytes for the program's standard input.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    input: bytes

    @classmethod
    def checked(
        cls, command: Sequence[str], files: Mapping[str, str] | None, input_text: str, max_bytes: int | None = None
    ) -> Request:
        """Make a request from the arguments of `Sandbox.run`.

        Args:
            command: program and arguments.
            files: texts by path, relative to the command's working directory.
            input_text: text for the program's standard input.
            max_bytes: limit on the size of all files together; None: no limit.

        Raises:
            ValueError: the sandbox cannot run such a command, or cannot hold such files.
        """
        if isinstance(command, str) or not command:
            raise ValueError(f"a command must be a list with at least one argument: {command!r}")
        for argument in command:
            if "\0" in argument or len(_encoded(argument, "an argument")) >= MAX_ARGUMENT_BYTES:
                raise ValueError(f"Linux cannot pass this argument to a program: {argument[:80]!r}")
        contents = {_checked_path(path): _encoded(text, path) for path, text in (files or {}).items()}
        if len(contents) > MAX_FILES:
            raise ValueError(f"{len(contents)} files are too many; a command may have {MAX_FILES}")
        for path in contents:
            parent = next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in contents), None)
            if parent:
                raise ValueError(f"{parent!r} cannot be both a file and the folder of {path!r}")
        size = sum(map(len, contents.values()))
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"the files have {size} bytes; the sandbox holds {max_bytes}")
        return cls(tuple(command), contents, _encoded(input_text, "the input"))


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name[:80]!r} cannot be encoded as UTF-8: {error.reason}") from error


def _checked_path(path: str) -> str:
    parts = path.split("/")
    if not path or "\0" in path or ".." in parts or path.startswith("/"):
        raise ValueError(f"{path[:80]!r} is not a path within the command's working directory")
    normal = str(PurePosixPath(path))
    lengths = [len(_encoded(name, path)) for name in normal.split("/")]
    is_too_long = max(lengths) > MAX_NAME_BYTES or sum(lengths) + len(lengths) > MAX_PATH_BYTES
    if normal == "." or path.endswith("/") or is_too_long:
        raise ValueError(f"{path[:80]!r} cannot be the path of a file")
    return normal


def sealed(content: bytes) -> int:
    """Return the descriptor of a file in memory that can be read but never changed. The caller closes it."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
