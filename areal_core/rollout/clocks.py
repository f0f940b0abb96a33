"""How long episodes may take, counted only while they can make progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class EpisodeClocks:
    """One clock for each running episode; all of them stand still while the engines cannot generate.

    Args:
        timeout_s: that an episode may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began: dict[asyncio.Task[None], float] = {}
        self._stopped_at: float | None = None
        self.overdue: set[asyncio.Task[None]] = set()
        """Episodes that were cancelled because they took too long, until they have ended."""

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The running episodes."""
        return list(self._began)

    def start(self, task: asyncio.Task[None]) -> None:
        """An episode begins; its clock goes with it."""
        self._began[task] = time.monotonic()
        task.add_done_callback(self._forget)

    def stop(self) -> None:
        """The engines have no memory or no weights: no episode can go on."""
        self._stopped_at = self._stopped_at or time.monotonic()

    def go_on(self) -> None:
        """The engines generate again."""
        if self._stopped_at is not None:
            now, stopped_at, self._stopped_at = time.monotonic(), self._stopped_at, None
            self._began = {task: began + now - max(began, stopped_at) for task, began in self._began.items()}

    def cancel_overdue(self) -> None:
        """Cancel episodes that took longer than they may."""
        if self._stopped_at is not None:
            return
        overdue = time.monotonic() - self._timeout_s
        for task, began in list(self._began.items()):
            if began >= overdue:
                return  # they are in the order in which they began
            self.overdue.add(task)
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._began.pop(task, None)
        self.overdue.discard(task)
