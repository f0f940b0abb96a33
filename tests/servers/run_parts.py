"""What the tests of runs with true servers share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from areal_core.disk import read_lines

ROOT = Path(__file__).parents[2]
CONFIGS = "tests/servers_on_cpu"
START = [sys.executable, "-m", "areal_core"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
HANG_S = 900
"""A wait that is longer has no end; everything here takes seconds or a minute."""


def areal(*words):
    return subprocess.run(
        [*START, *map(str, words)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def wait_for(condition, process, what):
    """Until something is so; whoever is to bring it about must live."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert process.poll() is None, f"it ended with exit code {process.poll()} before: {what}"
        assert time.monotonic() < deadline, f"waited {HANG_S} s in vain for: {what}"
        time.sleep(0.2)


def transitions(run_dir, server):
    """The states of a server and their versions, without those of every weight sync: held, and put back."""
    entries = read_lines(run_dir / "logs" / "servers.jsonl")
    own = [(entry["state"], entry["version"]) for entry in entries if entry["server"] == server]
    return [one for former, one in zip([("", 0), *own], own, strict=False) if "updating" not in (former[0], one[0])]


def end(*processes):
    for process in processes:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
