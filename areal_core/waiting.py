"""Waits: polling with progress messages and a deadline, and exponential backoff.

Write each loop of the form "check every x s, log every y s, give up after z s" as one of these two:

    for waited_s in polls(POLL_S, timeout_s, log=log, waiting_for=lambda: f"{count} machines"):
        if len(machines) >= count:
            break
    else:
        raise RunError(f"{len(machines)} of {count} machines joined within {timeout_s:g} s")

`async for waited_s in polls_async(...)` does the same without blocking the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

LOG_EVERY_S = 10.0
"""Seconds between two progress messages of a wait."""


def polls(
    poll_s: float,
    timeout_s: float = math.inf,
    *,
    log: Callable[[str], object] | None = None,
    waiting_for: Callable[[], str] = lambda: "",
    log_every_s: float = LOG_EVERY_S,
) -> Iterator[float]:
    """Yield the seconds waited so far: immediately, then every `poll_s` seconds, and a last time at the deadline.

    Args:
        poll_s: seconds between two polls.
        timeout_s: seconds after which the iteration ends. The last poll is at the deadline, so that a timeout of 0
            polls once.
        log: called with a progress message every `log_every_s` seconds; None logs nothing.
        waiting_for: returns what is awaited, for the message `waited 20 s of at most 60 s for ...`.
        log_every_s: seconds between two messages.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.processes import polls
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for waited_s in polls(0.01, timeout_s=0.03):
        ...         if (Path(folder) / "ready").exists():
        ...             break
        ...     else:
        ...         print("the server is not ready after 0.03 s")
        the server is not ready after 0.03 s
    """
    wait = _Wait(poll_s, timeout_s, log, waiting_for, log_every_s)
    while True:
        waited_s = wait.waited_s
        yield waited_s
        if waited_s >= timeout_s:
            return
        time.sleep(wait.next_pause_s())


async def polls_async(
    poll_s: float,
    timeout_s: float = math.inf,
    *,
    log: Callable[[str], object] | None = None,
    waiting_for: Callable[[], str] = lambda: "",
    log_every_s: float = LOG_EVERY_S,
) -> AsyncIterator[float]:
    """Do the same as `polls` without blocking the event loop. The arguments are those of `polls`.

    Example:
        >>> import asyncio
        >>> from areal_core.processes import polls_async
        >>> async def main():
        ...     loading = asyncio.create_task(asyncio.sleep(0.02))
        ...     async for waited_s in polls_async(0.005, timeout_s=10, waiting_for=lambda: "the model"):
        ...         if loading.done():
        ...             return waited_s < 10
        >>> asyncio.run(main())
        True
    """
    wait = _Wait(poll_s, timeout_s, log, waiting_for, log_every_s)
    while True:
        waited_s = wait.waited_s
        yield waited_s
        if waited_s >= timeout_s:
            return
        await asyncio.sleep(wait.next_pause_s())


def backoff_s(failures: int, *, first_s: float, factor: float = 2.0, longest_s: float) -> float:
    """Return the seconds to pause after so many failures in a row: `first_s`, then `factor` times the pause before."""
    return min(longest_s, first_s * factor ** (failures - 1))


class _Wait:
    """The clock of one wait. It decides on pauses and progress messages."""

    def __init__(
        self,
        poll_s: float,
        timeout_s: float,
        log: Callable[[str], object] | None,
        waiting_for: Callable[[], str],
        log_every_s: float,
    ) -> None:
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._log = log
        self._waiting_for = waiting_for
        self._log_every_s = log_every_s
        self._began_at = time.monotonic()
        self._logged_at = self._began_at

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_at

    def next_pause_s(self) -> float:
        """Log progress if it is due. Return the seconds until the next poll."""
        waited_s = self.waited_s
        if self._log is not None and time.monotonic() - self._logged_at >= self._log_every_s:
            self._logged_at = time.monotonic()
            limit = "" if math.isinf(self._timeout_s) else f" of at most {self._timeout_s:.0f} s"
            self._log(f"waited {waited_s:.0f} s{limit} for {self._waiting_for()}")
        return max(0.0, min(self._poll_s, self._timeout_s - waited_s))
