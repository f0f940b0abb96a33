"""Lines for the terminal, written by one thread of the driver.

A terminal that is not read (Ctrl-S, a laptop asleep, a pager) blocks a write, and a closed terminal fails it. The
driver's event loop never writes to the terminal, so that neither affects the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from areal_core.background import BackgroundQueue
from areal_core.disk import open_private
from areal_core.errors import let_go, printable, written_for
from areal_core.runtime.logs import bound_log

if TYPE_CHECKING:
    from pathlib import Path

KEPT_LINES = 1000
"""Lines that may wait for a blocked terminal. If there are more, the oldest are dropped."""
CLOSING_S = 2.0
"""Seconds that the last lines may wait for a reader when the program ends."""


def log(line: str) -> None:
    """Write a line to standard output. A reader that has exited (`| head`, a closed terminal) is no error."""
    try:
        sys.stdout.write(written_for(sys.stdout, f"{printable(line)}\n"))
        sys.stdout.flush()
    except OSError:
        let_go(sys.stdout)
        try:
            sys.stderr.write("areal: the terminal is gone; the run continues and writes to its folder\n")
        except OSError:
            let_go(sys.stderr)


class Terminal:
    """Writes lines to the terminal from a thread of its own.

    Attributes:
        log_path: file that also gets each line, with its time; None before there is a run folder.
    """

    def __init__(self) -> None:
        self.log_path: Path | None = None
        self._queue = BackgroundQueue("writing to the terminal", KEPT_LINES, self._report_dropped)

    def log(self, line: str) -> None:
        """Queue a line for the terminal and for the log, and return immediately."""
        self._queue.put(partial(self._write, line))

    def keep(self, line: str) -> None:
        """Write a line to the log file only. If the disk is full, the line is lost.

        The file is readable by its user only, because it quotes other logs.
        """
        if self.log_path is None:
            return
        with contextlib.suppress(OSError):
            with open_private(self.log_path, "a", encoding="utf-8", errors="replace") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}\n")
            bound_log(self.log_path)

    def close(self) -> None:
        """Wait up to `CLOSING_S` seconds until everything is written."""
        if not self._queue.close(time.monotonic() + CLOSING_S):
            # The thread blocks inside the stream and holds its lock: flushing the stream at exit would block or abort.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")

    def _write(self, line: str) -> None:
        self.keep(line)
        log(line)

    def _report_dropped(self, count: int) -> None:
        log(f"{count} lines were dropped while the terminal was blocked")
