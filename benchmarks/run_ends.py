"""How a benchmark ends what it started."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.launchers.guard import kill_tree

if TYPE_CHECKING:
    import subprocess

GONE_S = 60.0
"""For processes that were asked or made to end."""


def end_run(run: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Kill a run, and wait until none of its processes is left: the next one needs the GPUs."""
    if run.poll() is None:
        kill_tree(run.pid)  # and not its process group: torchrun's ranks have groups of their own
        run.wait()
    deadline = time.monotonic() + GONE_S
    while names_of(run_dir):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {run_dir} are still there: {names_of(run_dir)}")
        time.sleep(0.2)


def names_of(run_dir: Path) -> list[str]:
    """The Python processes that have a run's folder, or a file in it, among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *words = path.read_bytes().decode(errors="replace").split("\0")
            if "python" in program and "view" not in words and any(f"{run_dir}/" in f"{word}/" for word in words):
                found.append(" ".join([program, *words]))
    return found


def leave_when_asked() -> None:
    """Ctrl-C, a request to end and a lost connection also end what was started, which has sessions of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
