"""What the terminal shows of an evaluation while it goes on."""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from areal_core.driver import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Show = Callable[[str, int, int], object]
    """Takes words, how many episodes have ended, and how many there are; 0 where that is not known yet."""

LINE_INTERVAL_S = 5.0


@contextmanager
def show_progress() -> Iterator[Show]:
    """A bar on a terminal, a line every few seconds elsewhere; both on standard error, which no result is read from.

    What is shown is written by a thread: a terminal that nobody reads does not hold up the evaluation.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, shown = Console(stderr=True), -math.inf
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)

        def show(words: str, done: int, total: int) -> None:
            nonlocal shown
            with suppress(OSError):  # a terminal that is gone
                bar.update(task, description=words, completed=done, total=total or None)
                if bar.disable and time.monotonic() - shown > LINE_INTERVAL_S:
                    shown = time.monotonic()
                    sys.stderr.write(f"{f'{done}/{total} episodes  ' if total else ''}{words}\n")
                    sys.stderr.flush()

        with closing(Terminal()) as terminal:
            yield lambda *told: terminal.draw(partial(show, *told))
