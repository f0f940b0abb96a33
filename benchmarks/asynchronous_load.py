"""The CPU that the processes of a run take, by their roles."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from areal_core.runs import RunFolder
from areal_core.runtime.attempts import ask_driver
from areal_core.runtime.messages import RunStatus, StatusRequest

ASK_TIMEOUT_S = 2.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(run_dir: Path) -> dict[str, float]:
    """Seconds that the processes of each role have computed so far; nothing where the driver does not answer."""
    attempt = RunFolder(run_dir).last_attempt
    answer = ask_driver(attempt, StatusRequest(), ASK_TIMEOUT_S) if attempt is not None else None
    if not isinstance(answer, RunStatus):
        return {}
    pids = {(process.role, process.pid) for process in answer.processes.values()} | {("driver", answer.pid)}
    found: defaultdict[str, float] = defaultdict(float)
    for role, pid in pids:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[role] += (int(words[11]) + int(words[12])) / TICKS
    return dict(found)
