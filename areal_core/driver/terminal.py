"""The one thread of a program that writes to its terminal.

A terminal that nobody reads (Ctrl-S, a laptop asleep, a pager) makes a write wait for ever, and one that was closed
makes it fail. The event loop that keeps a run alive never writes, so neither touches the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from areal_core.background import start_thread
from areal_core.errors import let_go, printable, written_for
from areal_core.launchers.guard import bound_log

if TYPE_CHECKING:
    from pathlib import Path

KEPT_LINES = 1000
"""Lines that wait for a terminal which nobody reads; of more the oldest are left out."""
CLOSING_S = 2.0
"""For which the last lines wait for somebody to read them."""


def log(line: str) -> None:
    """Write a line to standard output; that its reader has gone (`| head`, a closed terminal) ends nothing."""
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
    """Lines on their way to the terminal.

    Attributes:
        log_path: where lines are kept as well, each with its time; None before there is a run folder.
    """

    def __init__(self) -> None:
        self.log_path: Path | None = None
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._left_out = 0
        self._is_busy, self._is_closed = False, False
        start_thread(self._write, "writing to the terminal")

    def log(self, line: str) -> None:
        """Have a line written; returns at once."""
        with self._changed:
            self._left_out += len(self._lines) == KEPT_LINES
            self._lines.append(line)
            self._changed.notify_all()

    def keep(self, line: str) -> None:
        """Write a line to the log alone, of its user alone, for it quotes other logs. A full disk costs the line."""
        if self.log_path is None:
            return
        with contextlib.suppress(OSError):
            file = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(file, "a", encoding="utf-8", errors="replace") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}\n")
            bound_log(self.log_path)

    def close(self) -> None:
        """Wait a moment until everything is written; what nobody reads by then is left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._lines or self._is_busy), CLOSING_S):
                # The thread waits within the stream and holds its lock: whoever flushed it would wait too, or abort.
                sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            self._is_closed = True
            self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if self._is_closed:
                    return
                lines, self._lines = self._lines, deque(maxlen=KEPT_LINES)
                left_out, self._left_out, self._is_busy = self._left_out, 0, True
            if left_out:
                log(f"{left_out} lines were left out while nobody read them")
            for line in lines:
                self.keep(line)
                log(line)
