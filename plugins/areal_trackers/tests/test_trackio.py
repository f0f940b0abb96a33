"""Trackio on this machine, offline: in a process of its own, because its folder is fixed when it is imported."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trackio")

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from pathlib import Path
from trackio.sqlite_storage import SQLiteStorage
from areal_trackers.config import TrackioSettings
from areal_trackers.trackio import TrackioTracker

root = Path(sys.argv[1])
for folder, steps in json.loads(sys.argv[2]):
    run_dir = root / folder
    run_dir.mkdir(parents=True, exist_ok=True)
    tracker = TrackioTracker(TrackioSettings(project="sums"))
    tracker.start(run_dir, {"seed": 1})
    for step in steps:
        tracker.log(step, {"reward": step / 4})
    tracker.close()
    tracker.close()
runs = {
    name: [(entry["step"], entry["reward"]) for entry in SQLiteStorage.get_logs("sums", name)]
    for name in SQLiteStorage.get_runs("sums")
}
Path(sys.argv[3]).write_text(json.dumps(runs))
"""


def track(tmp_path, runs):
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(runs), str(found)],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text())


def test_metrics_are_stored_and_a_resumed_run_goes_on_as_the_same(tmp_path):
    runs = track(tmp_path, [("first", [1, 2]), ("first", [3])])
    assert runs == {"first": [[1, 0.25], [2, 0.5], [3, 0.75]]}
    assert (tmp_path / "first" / "trackio_name.txt").read_text() == "first"
