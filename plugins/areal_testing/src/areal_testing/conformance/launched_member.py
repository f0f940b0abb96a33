"""A stand-in for a process of a run: it writes its placement to a file, starts orphans, and dies on demand.

The argument of this program is the folder of its files.
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


def run(member: Member) -> int:
    """Report to the hub, and wait until a file asks this process to die or the hub closes the connection."""
    folder = Path(sys.argv[1])
    placement = member_place(os.environ)
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], start_new_session=True)
    report = {
        "pid": os.getpid(),
        "index": placement.index,
        "node": placement.node,
        "gpus": placement.gpus,
        "variable": os.environ.get("CONFORMANCE_VARIABLE"),
    }
    member.announce("up", "")
    member.enter("waiting")
    temporary = folder / f".{member.name}.json"
    temporary.write_text(json.dumps(report))
    temporary.rename(folder / f"{member.name}.json")
    while True:
        time.sleep(POLL_S)
        request = folder / f"die-{member.name}"
        if request.exists():
            request.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_role(run))
