"""Liveness of processes: which ones are silent, and which ones hang in a phase.

Each process sends a heartbeat every second, with its phase and the limits of that phase.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from areal_core.runtime.hub import Process

LOGGED_AFTER_S = 10.0
"""Seconds of silence after which the supervisor logs it."""
SUSPENDED_S = 5.0
"""A longer gap between checks means that the driver was suspended: heartbeats that it missed are ignored."""


class Liveness:
    """Watches the heartbeats of a run's processes.

    Args:
        log: shows a line to the user.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._silent: set[Process] = set()
        self._checked_at = time.monotonic()

    def find_hanging(self, processes: Iterable[Process]) -> Iterator[tuple[Process, str]]:
        """Yield each process that hangs, with the reason. Log which ones fall silent and respond again.

        Call it a few times a second.
        """
        now = time.monotonic()
        was_suspended = now - self._checked_at > SUSPENDED_S
        self._checked_at = now
        processes = list(processes)
        self._silent &= set(processes)
        for process in processes:
            if was_suspended:
                process.heard_at = now
            self._log_changes(process)
            reason = _hang_of(process)
            if reason:
                yield process, reason

    def _log_changes(self, process: Process) -> None:
        if process.silent_s <= LOGGED_AFTER_S:
            if process in self._silent:
                self._silent.discard(process)
                self._log(f"{process.name} responds again")
        elif process not in self._silent:
            self._silent.add(process)
            self._log(f"{process.name} {_silence_of(process)}")


def _hang_of(process: Process) -> str:
    """Return why a process is considered lost; empty if it is not."""
    silent_s, beat = process.silent_s, process.beat
    if silent_s > LOGGED_AFTER_S:
        is_lost = 0 < beat.silence_s < silent_s
        return f"{_silence_of(process)}: it is considered lost" if is_lost else ""
    if 0 < beat.limit_s < beat.seconds + silent_s:
        limit = f"its limit is {beat.limit_s:.0f} s"
        return f"hangs: it has been in the phase '{beat.phase}' for {beat.seconds:.0f} s, and {limit}"
    return ""


def _silence_of(process: Process) -> str:
    return f"has been silent for {process.silent_s:.0f} s (phase {process.beat.phase})"
