"""All processes of a run on this machine, as children of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.launcher import ProcessSpecification
    from areal_core.launchers.settings import LocalSettings


class LocalLauncher:
    """Starts child processes, each in a session of its own and with a log file of its own.

    A terminal's Ctrl-C reaches only this process, which decides what to do with it; each child ends when this process
    dies (see `areal_core.launchers.processes.end_with_parent`).
    """

    def __init__(self, settings: LocalSettings) -> None:
        self.trainer_processes = settings.trainer_processes
        self._threads = settings.threads_per_process
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, processes: Sequence[ProcessSpecification], run_dir: Path) -> None:
        """See `Launcher.start`."""
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        for process in processes:
            environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), **process.environment}
            with (logs / f"{process.name}.log").open("ab") as log:
                self._processes[process.name] = subprocess.Popen(
                    [sys.executable, *process.arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def poll(self) -> Mapping[str, int]:
        """See `Launcher.poll`."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def interrupt(self) -> None:
        """See `Launcher.interrupt`: the trainer's ranks stop at the next step, and the controller with them."""
        self._signal(signal.SIGTERM, [name for name in self._processes if name.startswith("trainer")])

    def stop(self, grace_s: float) -> None:
        """See `Launcher.stop`."""
        deadline = time.monotonic() + grace_s
        while len(self.poll()) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL, list(self._processes))
        for process in self._processes.values():
            process.wait()

    def _signal(self, number: signal.Signals, names: Sequence[str]) -> None:
        for name in names:
            if self._processes[name].poll() is None:
                with suppress(ProcessLookupError):
                    self._processes[name].send_signal(number)
