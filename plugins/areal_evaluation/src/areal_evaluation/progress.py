"""Progress of an evaluation on the terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Show = Callable[[str, int, int], object]
    """Takes a text, the number of episodes that have ended, and their total; 0 if the total is not known yet."""

LINE_INTERVAL_S = 5.0
"""Seconds between progress lines if standard error is not a terminal."""


@contextmanager
def show_progress() -> Iterator[Show]:
    """Show a bar on a terminal, or a line every few seconds elsewhere, on standard error; results go to stdout."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    interval = 0.1 if sys.stderr.isatty() else LINE_INTERVAL_S
    with tqdm(unit=" episodes", leave=False, mininterval=interval, maxinterval=interval) as bar:

        def show(text: str, done: int, total: int) -> None:
            with suppress(OSError):  # the terminal is closed
                bar.total = total or None
                bar.set_description_str(text, refresh=False)
                bar.update(done - bar.n)

        yield show
