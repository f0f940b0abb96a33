"""Processes that are not heard: told after a while, and lost after as long as their phase may be silent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from areal_core.errors import LostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from areal_core.driver.hub import Process

TOLD_S = 10.0
"""Silence after which it is told."""
SLEPT_S = 5.0
"""Between two looks: this program slept itself, and what it did not hear meanwhile says nothing."""


class Liveness:
    """Who is silent now, and who is too long in a phase.

    Args:
        log_path: the file for the output of a process, by its name.
        log: shows a line to the user.
        hang_up: ends a process that may be replaced.
    """

    def __init__(
        self, log_path: Callable[[str], Path], log: Callable[[str], None], hang_up: Callable[[Process, str], None]
    ) -> None:
        self._log_path, self._log, self._hang_up = log_path, log, hang_up
        self._silent: set[str] = set()
        self._looked = time.monotonic()

    def check(self, processes: Iterable[Process]) -> None:
        """Tell of those that have fallen silent or are heard again; end those that hang and may be replaced.

        Raises:
            LostError: one without which the run cannot go on was silent, or in one phase, for too long.
        """
        now, looked = time.monotonic(), self._looked
        self._looked = now
        for process in list(processes):
            if now - looked > SLEPT_S:
                process.heard = now
            self._check(process)

    def _check(self, process: Process) -> None:
        silent, beat = process.silent_s, process.beat
        name, is_late = process.name, 0 < beat.limit_s < beat.seconds + silent
        if name in self._silent and silent <= TOLD_S:
            self._silent.discard(name)
            self._log(f"{name} responds again")
        if silent > TOLD_S:
            message = f"{name} has been silent for {silent:.0f} s (phase {beat.phase})"
            if name not in self._silent:
                self._silent.add(name)
                self._log(message)
            if silent > beat.silence_s > 0:
                self._lose(process, f"{message}: it is considered lost")
        elif is_late:
            self._lose(
                process,
                f"{name} hangs: it has been in the phase '{beat.phase}' for {beat.seconds:.0f} s, and may be for "
                f"{beat.limit_s:.0f}",
            )

    def _lose(self, process: Process, message: str) -> None:
        if not process.is_essential:
            self._hang_up(process, message.removeprefix(f"{process.name} "))
        elif not process.ended.done():
            hints = [f"its log: {self._log_path(process.name)}", "a slow machine: raise training.phase_timeout_s"]
            raise LostError(message, hints=hints)
