"""What a sandbox is asked: command, files and input, held to what can be done before anything is started."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_FILES = 256
"""Each is an open file for a moment, and a process may have about a thousand."""
LONGEST_NAME, LONGEST_PATH, LONGEST_WORD = 255, 1024, 1 << 17
"""Bytes, as Linux has them."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Request:
    """A command that can be run.

    Attributes:
        words: program and arguments.
        files: contents by their relative paths.
        input: what the program reads from its standard input.
    """

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    input: bytes

    @classmethod
    def checked(
        cls, command: Sequence[str], files: Mapping[str, str] | None, input_text: str, most_bytes: int | None = None
    ) -> Request:
        """From what `Sandbox.run` is given; `ValueError` in a sentence where that cannot be done."""
        if isinstance(command, str) or not command:
            raise ValueError(f"a command is a list of words, with at least one: {command!r}")
        for word in command:
            if not word.strip("\0") == word or "\0" in word or len(_encoded(word, "a word")) >= LONGEST_WORD:
                raise ValueError(f"no program can be given this word: {word[:80]!r}")
        contents = {_checked_path(path): _encoded(text, path) for path, text in (files or {}).items()}
        if len(contents) > MOST_FILES:
            raise ValueError(f"{len(contents)} files are more than the {MOST_FILES} that a command may be given")
        for path in contents:
            above = next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in contents), None)
            if above:
                raise ValueError(f"{above!r} cannot be a file and a folder with {path!r}")
        size = sum(map(len, contents.values()))
        if most_bytes is not None and size > most_bytes:
            raise ValueError(f"the files have {size} bytes, and the sandbox holds {most_bytes}")
        return cls(tuple(command), contents, _encoded(input_text, "the input"))


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what[:80]!r} cannot be written as UTF-8: {error.reason}") from error


def _checked_path(path: str) -> str:
    parts = path.split("/")
    if not path or "\0" in path or ".." in parts or path.startswith("/"):
        raise ValueError(f"{path[:80]!r} is not a path within the folder of a command")
    normal = str(PurePosixPath(path))
    names = [len(_encoded(name, path)) for name in normal.split("/")]
    if normal == "." or path.endswith("/") or max(names) > LONGEST_NAME or sum(names) + len(names) > LONGEST_PATH:
        raise ValueError(f"{path[:80]!r} cannot be the path of a file")
    return normal


def sealed(content: bytes) -> int:
    """A file in memory that can be read from its beginning and never be changed; whoever opens it closes it."""
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
