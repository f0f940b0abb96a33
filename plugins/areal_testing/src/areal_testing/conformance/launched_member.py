"""A member that stands in for a process of a run: writes its place to a file, starts orphans, and dies on demand.

Its argument is the folder of these files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.processes import run_role
from areal_core.runtime.environment import member_place

if TYPE_CHECKING:
    from areal_core.processes import Member

POLL_S = 0.02


def play(member: Member) -> int:
    """Wait until a file asks this process to die, or the hub closes the connection."""
    folder = Path(sys.argv[1])
    place = member_place(os.environ)
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], start_new_session=True)
    report = {
        "pid": os.getpid(),
        "index": place.index,
        "node": place.node,
        "gpus": place.gpus,
        "variable": os.environ.get("CONFORMANCE_WORDS"),
    }
    member.announce("up", "")
    member.enter("waiting")
    fresh = folder / f".{member.name}.json"
    fresh.write_text(json.dumps(report))
    fresh.rename(folder / f"{member.name}.json")
    while True:
        time.sleep(POLL_S)
        mark = folder / f"die-{member.name}"
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_role(play))
