"""Every error that areal raises on purpose, and the exit code that each one ends the program with.

    ArealError
    ├── UsageError                 2   the command line itself is wrong
    ├── ConfigError                2   a config, or a value in it, is wrong; carries all problems found
    ├── PluginError                2   something about plugins; the subclasses say what
    │   ├── PluginMissingError          2   a plugin that was named is not installed
    │   ├── PluginBrokenError           2   it is installed and cannot be loaded, or supplies something invalid
    │   ├── PluginIncompatibleError     2   its range on areal-core excludes the core that is installed, or is missing
    │   ├── PluginConflictError         2   two plugins claim one name
    │   └── ComponentNotFoundError      2   no loaded plugin supplies a component of this name
    └── RunError                   1   the request was right and the run failed
        └── LostError              1   a process or a node was lost: from the last commit on it may well go better

An error is read by somebody who wants to go on working. Its message says what was asked and what is wrong; its hints,
one line each, say first which command or edit repairs it and then what is available. The command line prints both
without a traceback; `--debug` shows the traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO

_STEERING = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What steers a terminal instead of being shown; lines and tabs are shown."""


def printable(text: str) -> str:
    """A text for a terminal, in which others may have had a word: the end of a log, what an agent raised."""
    return _STEERING.sub("", text)


def written_for(stream: TextIO, text: str) -> str:
    """A text in the letters that a stream has: in the C locale it has none of other alphabets, and they are numbers."""
    code = stream.encoding or "utf-8"
    return text.encode(code, "backslashreplace").decode(code)


def let_go(stream: TextIO) -> None:
    """What a stream still holds goes nowhere: Python would try it again at the program's end, and end with 120."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def traceback_of(error: BaseException) -> str:
    """As Python writes it; the last line says what failed, also of a group: its own words and its first error."""
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    words = "".join(traceback.format_exception(error))
    return words if first is error else f"{words}{error}: {type(first).__name__}: {first}"


def own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines that led to an error and are not of Python, of a library or of areal; the last one is nearest to it."""
    installed = (sys.prefix, sys.base_prefix, "<", str(Path(__file__).parent))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]


def line_of(error: BaseException) -> str:
    """The last of `own_lines`, and the first where that is another one, in brackets; empty without one."""
    named = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in own_lines(error)]
    return f" ({', called from '.join(dict.fromkeys((named[-1], named[0])))})" if named else ""


def writable(text: object) -> str:
    """A text that UTF-8 can hold: half a character, such as half an emoji, is written as its number."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class ArealError(Exception):
    """The root of the tree: a message, hint lines and the exit code of the program."""

    exit_code = 2

    def __init__(self, message: str, *, hints: Iterable[str] = (), exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.hints))


class UsageError(ArealError):
    """The command line is wrong: an unknown word, a missing file, two options that exclude each other."""


class ConfigError(ArealError):
    """A config is wrong. `problems` holds each mistake with its place; all of them are found before any is told."""

    def __init__(self, message: str, *, hints: Iterable[str] = (), problems: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.problems = tuple(problems)


class PluginError(ArealError):
    """Something about plugins is wrong; the message names the plugin, its distribution and its version.

    Several errors found at once travel as one: `parts` are they, or the error itself.
    """

    def __init__(self, message: str, *, hints: Iterable[str] = (), parts: Sequence[PluginError] = ()) -> None:
        super().__init__(message, hints=hints)
        self.parts = tuple(parts) or (self,)


class PluginMissingError(PluginError):
    """Plugins that were named are not installed; `names` are theirs."""

    def __init__(self, message: str, *, hints: Iterable[str] = (), names: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.names = tuple(names)


class PluginBrokenError(PluginError):
    """A plugin is installed but cannot be imported, or what it supplies does not follow the rules."""


class PluginIncompatibleError(PluginError):
    """A plugin's declared range on areal-core does not contain the core that is installed, or is not declared."""


class PluginConflictError(PluginError):
    """Two distributions claim one plugin name, or two plugins one component name."""


class ComponentNotFoundError(PluginError):
    """No loaded plugin supplies a component of this kind and name."""


class RunError(ArealError):
    """The request was right and the run failed: a worker died, a deadline passed, a disk was full."""

    exit_code = 1


class LostError(RunError):
    """A process of the run was killed, hung or fell silent, or its node did: nothing that was asked is at fault."""
