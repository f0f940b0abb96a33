"""A member that stands in for a process of a run: says who it is, starts orphans, and dies where it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.launchers.member import LOGS_VARIABLE, run_role
from areal_core.launchers.places import PLACES_VARIABLE

if TYPE_CHECKING:
    from areal_core.launchers.member import Member

POLL_S = 0.02


def play(member: Member) -> int:
    """Until it is asked to die, by a file, or the hub hangs up."""
    folder = Path(os.environ[LOGS_VARIABLE]).with_name("members")
    places = {name: (index, node, gpus) for index, name, node, gpus in json.loads(os.environ[PLACES_VARIABLE])}
    index, node, gpus = places[member.name]
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], start_new_session=True)
    words = os.environ.get("CONFORMANCE_WORDS")
    told = {"pid": os.getpid(), "index": index, "node": node, "gpus": gpus, "variable": words}
    member.announce("up", "")
    member.enter("waiting")
    fresh = folder / f".{member.name}.json"
    fresh.write_text(json.dumps(told))
    fresh.rename(folder / f"{member.name}.json")
    while True:
        time.sleep(POLL_S)
        mark = folder / f"die-{member.name}"
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_role(play))
