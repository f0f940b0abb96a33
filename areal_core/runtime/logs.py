"""Log files of processes: where they are, how they are opened and kept short, and how they end."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from areal_core.disk import open_private
from areal_core.runtime.environment import LOGS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG_BYTES = 1 << 26
"""Bytes of a log file. A process has at most two: the current one, and `NAME.1` with what came before."""
LAST_BYTES = 4000
"""Bytes at the end of a log that the report of an ended process shows at most."""
LAST_LINES = 15
"""Lines at the end of a log that the report of an ended process shows at most."""


def member_log(environment: Mapping[str, str], name: str) -> Path | None:
    """Return the log file of a member; None if its environment names no folder for logs."""
    return Path(environment[LOGS_VARIABLE]) / f"{name}.log" if LOGS_VARIABLE in environment else None


def append_to_log(path: Path) -> IO[bytes]:
    """Open a log file. Only the user may read it, because some programs write their keys into their logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open_private(path, "ab")


def open_log(path: Path) -> None:
    """Redirect standard output and error of this process to a log file; see `append_to_log`."""
    with suppress(OSError), append_to_log(path) as file:  # on a full disk the log is lost, and the process continues
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def bound_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Empty a log that is larger than `limit` bytes. Its last `limit` bytes stay as `NAME.1`, for the user only."""
    with suppress(OSError):
        size = path.stat().st_size
        if size > limit:
            with path.open("rb") as full, open_private(path.with_name(f"{path.name}.1"), "wb") as kept:
                os.sendfile(kept.fileno(), full.fileno(), size - limit, limit)
            os.truncate(path, 0)


def timeline_of(log: Path) -> Path:
    """Return the file beside a log that records the phases of the process, one JSON object a line."""
    return log.with_suffix(".jsonl")


def last_words(log: Path) -> str:
    """Return the last lines of a log; nothing if there is no log.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.processes import last_words
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder) / "server-0.log"
        ...     _ = log.write_text("".join(f"line {number}\\n" for number in range(100)))
        ...     lines = last_words(log).splitlines()
        >>> len(lines), lines[-1]
        (15, 'line 99')
    """
    with suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])
    return ""


class _LossyStream(io.TextIOWrapper):
    """A text stream that drops what it cannot write."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def lose_lines_on_a_full_disk() -> None:
    """Drop lines of standard output and error that cannot be written, instead of raising an error in this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        setattr(sys, name, _LossyStream(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True))
