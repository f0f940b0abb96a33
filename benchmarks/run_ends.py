"""How a benchmark ends what it started."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

from areal_core.runtime.process_tree import kill_tree, processes_with

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

GONE_S = 60.0
"""For processes that were asked or made to end."""
RUN_VARIABLE = "AREAL_BENCHMARK_RUN"
"""Has the run's folder in the environment of all its processes."""


def end_run(run: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Kill a run, and wait until none of its processes is left: the next one needs the GPUs."""
    if run.poll() is None:
        kill_tree(run.pid)  # and not its process group: torchrun's ranks have groups of their own
        run.wait()
    deadline = time.monotonic() + GONE_S
    while left := processes_with(RUN_VARIABLE, str(run_dir)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {run_dir} are still there: {left}")
        time.sleep(0.2)


def leave_when_asked() -> None:
    """Ctrl-C, a request to end and a lost connection also end what was started, which has sessions of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
