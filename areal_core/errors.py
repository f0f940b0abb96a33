"""The errors that areal raises on purpose, and the exit code of the program for each.

    ArealError
    ├── UsageError                 2   the command line is wrong
    ├── ConfigError                2   a config, or a value in it, is wrong; has all problems of the config
    ├── PluginError                2   a problem with plugins
    │   ├── PluginMissingError          2   a plugin is not installed
    │   ├── PluginBrokenError           2   a plugin cannot be loaded, or supplies something invalid
    │   ├── PluginIncompatibleError     2   a plugin does not support the installed version of areal-core
    │   ├── PluginConflictError         2   two plugins claim one name
    │   └── ComponentNotFoundError      2   no loaded plugin has a component of this name
    └── RunError                   1   the request was right, and the run failed
        └── LostError              1   a process or a node was lost: a retry from the last commit may succeed

The message of an error has what was requested and what is wrong. Its hints are lines: first the command or edit that
repairs it, then what is available. The command line prints both without a traceback; `--debug` adds the traceback.
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

# The classes below `PluginError` are not public: its `parts` have a message and hints for each problem.
__all__ = [
    "ArealError",
    "ConfigError",
    "LostError",
    "PluginError",
    "RunError",
    "UsageError",
    "traceback_of",
]

_STEERING = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Matches control sequences of terminals, except for newlines and tabs."""


def printable(text: str) -> str:
    """Remove control sequences from a text that may come from others, such as the end of a log or an agent's error."""
    return _STEERING.sub("", text)


def written_for(stream: TextIO, text: str) -> str:
    """Replace the characters that a stream cannot encode, such as non-ASCII letters in the C locale, with escapes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def let_go(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null. Otherwise Python flushes it again at exit and exits with code 120."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def traceback_of(error: BaseException) -> str:
    r"""Format an error with its traceback, as text that UTF-8 can encode.

    The last line of an exception group also names its first error.

    Example:
        >>> from areal_core.errors import traceback_of
        >>> group = ExceptionGroup("2 tasks failed", [OSError("disk full"), ValueError("no answer")])
        >>> traceback_of(group).splitlines()[-1]
        '2 tasks failed (2 sub-exceptions): OSError: disk full'
        >>> print(traceback_of(ValueError("caf\udce9")))  # a file name that is not UTF-8
        ValueError: caf\udce9
    """
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    text = "".join(traceback.format_exception(error))
    return writable(text if first is error else f"{text}{error}: {type(first).__name__}: {first}")


def own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error in the user's own code, without Python, libraries and areal, innermost last."""
    installed = (sys.prefix, sys.base_prefix, "<", str(Path(__file__).parent))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]


def line_of(error: BaseException) -> str:
    """Return the innermost and the outermost of `own_lines` in parentheses; empty if there are none."""
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in own_lines(error)]
    return f" ({', called from '.join(dict.fromkeys((places[-1], places[0])))})" if places else ""


def writable(text: object) -> str:
    r"""Return `str(text)` with escapes in place of unpaired surrogates, which UTF-8 cannot encode.

    File names that are not UTF-8 and answers of strangers have them.
    """
    return str(text).encode("utf-8", "backslashreplace").decode()


class ArealError(Exception):
    """Base of all errors: a message, hints, and the exit code of the program.

    Args:
        message: what was requested and what is wrong, in one line.
        hints: lines below it: first the command or edit that repairs it, then what is available.
        exit_code: of the program; by default that of the class.

    Attributes:
        message, hints, exit_code: as in the arguments. `hints` is a tuple.

    Example:
        >>> from areal_core.errors import ArealError
        >>> error = ArealError("there is no folder 'rnus'", hints=["did you mean 'runs'?"])
        >>> print(error)
        there is no folder 'rnus'
          did you mean 'runs'?
        >>> error.exit_code
        2
    """

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
    """The command line is wrong: an unknown word, a missing file, two options that exclude each other.

    Example:
        >>> from areal_core.errors import UsageError
        >>> def main(arguments: list[str]) -> int:  # a command of a plugin
        ...     if not arguments:
        ...         raise UsageError("no run folder is given", hints=["for example: areal mine plot runs/last"])
        ...     return 0
        >>> try:
        ...     main([])
        ... except UsageError as error:
        ...     print(error)
        no run folder is given
          for example: areal mine plot runs/last
    """


class ConfigError(ArealError):
    """A config is wrong. `problems` has every mistake with its place.

    Example:
        >>> from areal_core.config import resolve
        >>> from areal_core.errors import ConfigError
        >>> try:
        ...     resolve("run.yaml", overrides=["steps=", "seed="], environment={})
        ... except ConfigError as error:
        ...     for problem in error.problems:
        ...         print(problem)
        command line: the value of steps is empty; write null to clear it, '' for an empty text
        command line: the value of seed is empty; write null to clear it, '' for an empty text
    """

    def __init__(self, message: str, *, hints: Iterable[str] = (), problems: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.problems = tuple(problems)


class PluginError(ArealError):
    """A problem with plugins. The message names the plugin, its distribution and its version.

    If there are several problems, one error is raised and `parts` has an error for each. Otherwise `parts` has itself.

    Example:
        >>> from areal_core.errors import PluginError
        >>> from areal_core.plugins import PluginManager
        >>> try:
        ...     PluginManager.load(["no_such_plugin", "nor_this"])
        ... except PluginError as error:
        ...     print(error.message)
        ...     for part in error.parts:
        ...         print(f"- {part.message}")
        no plugins named 'no_such_plugin', 'nor_this' are installed
        - no plugin named 'no_such_plugin' is installed
        - no plugin named 'nor_this' is installed
    """

    def __init__(self, message: str, *, hints: Iterable[str] = (), parts: Sequence[PluginError] = ()) -> None:
        super().__init__(message, hints=hints)
        self.parts = tuple(parts) or (self,)


class PluginMissingError(PluginError):
    """Plugins are not installed; `names` has their names."""

    def __init__(
        self,
        message: str,
        *,
        hints: Iterable[str] = (),
        parts: Sequence[PluginMissingError] = (),
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(message, hints=hints, parts=parts)
        self.names = tuple(names)


class PluginBrokenError(PluginError):
    """A plugin is installed but cannot be imported, or supplies something invalid."""


class PluginIncompatibleError(PluginError):
    """A plugin does not support the installed version of areal-core, or does not declare which it supports."""


class PluginConflictError(PluginError):
    """Two distributions claim one plugin name, or two plugins one component name."""


class ComponentNotFoundError(PluginError):
    """No loaded plugin supplies a component of this kind and name."""


class RunError(ArealError):
    """The request was right and the run failed: a worker died, a deadline passed, a disk was full."""

    exit_code = 1


class LostError(RunError):
    """A process or a node of the run was killed, hung, or stopped responding. The request is not at fault.

    The run restarts from its last checkpoint. A component may raise it as well, in any process of the run.

    Example:
        >>> from areal_core.errors import LostError, RunError
        >>> try:
        ...     raise LostError("the sandbox host has not answered for 30 s", hints=["its log is logs/sandboxes.log"])
        ... except RunError as error:
        ...     print(error)
        ...     print(type(error).__name__, error.exit_code)
        the sandbox host has not answered for 30 s
          its log is logs/sandboxes.log
        LostError 1
    """
