"""What the terminal shows of an evaluation while it goes on."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Show = Callable[[str, int, int], object]
    """Takes words, how many episodes have ended, and how many there are; 0 where that is not known yet."""

LINE_INTERVAL_S = 5.0


@contextmanager
def show_progress() -> Iterator[Show]:
    """A bar on a terminal, a line every few seconds elsewhere; on standard error, which no result is read from."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    interval = 0.1 if sys.stderr.isatty() else LINE_INTERVAL_S
    with tqdm(unit=" episodes", leave=False, mininterval=interval, maxinterval=interval) as bar:

        def show(words: str, done: int, total: int) -> None:
            with suppress(OSError):  # a terminal that is gone
                bar.total = total or None
                bar.set_description_str(words, refresh=False)
                bar.update(done - bar.n)

        yield show
