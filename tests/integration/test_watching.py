"""`areal status` and `areal stop`: a run as somebody sees it who knows its folder alone."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
HANG_S = 600


def status(workplace: Workplace, code: int = 0) -> dict:
    found = workplace.areal("status", "run", "--json")
    assert found.code == code, found.err
    return json.loads(found.out)


def test_a_run_is_watched_stopped_and_gone_on_with(workplace: Workplace) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=2000")
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    seen = status(workplace)
    assert (seen["state"], seen["steps"], seen["attempt"], seen["pid"]) == ("running", 2000, 1, process.pid)
    assert seen["step"] >= 2
    assert seen["metrics"].keys() >= {"train/loss", "staleness/mean"}
    assert {seen["processes"][name]["host"] for name in ("trainer-0", "controller", "server-0")} == {"this machine"}
    message = workplace.areal("status", "run").out
    assert re.search(r"  controller +generating  process \d+ on this machine", message), message
    assert "running  step " in message
    assert " of 2000, " in message
    asked = workplace.areal("stop", "run", "--wait", "0")
    assert asked.code == 0, asked.err
    assert "areal status" in asked.out
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 143, err
    seen = status(workplace, code=1)
    assert seen["state"] == "interrupted"
    assert seen["checkpoint"] == seen["step"] >= 2
    again = workplace.areal("stop", "run")
    assert (again.code, again.err) == (0, ""), "what has stopped already needs nothing"

    process = workplace.start("run", "--resume", "run")
    workplace.wait_for(lambda: len(workplace.metrics()) > seen["step"], process)
    stopped = workplace.areal("stop", "run", "--now")
    assert stopped.code == 0, stopped.err
    assert "areal run --resume" in stopped.out
    assert process.wait(HANG_S) == 143
    assert workplace.areal("audit", "run").code == 0


def test_notes_and_diagnostics_are_shown_without_any_plugin_for_pages(workplace: Workplace) -> None:
    """On the console, in the log and by `areal status`: a reward of weight 0 gives no gradient."""
    words = ("run.yaml", "plugins=[grpo, hf, fsdp]", "rewards=[{type: parts.py:digits, weight: 0}]", "steps=2")
    note = "note: rewards: all weights are 0, so every answer earns the same"
    assert note in workplace.areal("config", "check", *words).out
    assert note.replace(":", "          ", 1) in workplace.areal("run", *words, "--dry-run").out
    done = workplace.areal("run", *words, "run_dir=run")
    assert done.code == 0, done.err
    finding = "step 1: the gradient was exactly 0, so nothing was learned in this step"
    log = (workplace.folder / "run" / "logs" / "driver.log").read_text()
    for shown in (done.out, log, workplace.areal("status", "run").out):
        assert shown.count(note) == shown.count(finding) == 1, shown
    assert [found["step"] for found in status(workplace)["diagnostics"]] == [0, 1]


@pytest.mark.nightly
def test_a_run_whose_driver_was_killed_is_lost(workplace: Workplace) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=2000")
    workplace.wait_for(lambda: len(workplace.metrics()) >= 1, process)
    process.kill()
    process.communicate(timeout=HANG_S)
    assert status(workplace, code=1)["state"] == "lost"
    assert "areal run --resume" in workplace.areal("status", "run").out


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_folder_that_is_no_run_is_refused(workplace: Workplace, command: str) -> None:
    for folder in ("missing", ".", "run.yaml"):
        found = workplace.areal(command, folder)
        assert folder != "run.yaml" or "run.yaml is a file" in found.err
        assert found.code == 2, found.out
        assert "Traceback" not in found.err
    assert subprocess.run(["ls", "runs"], cwd=workplace.folder, capture_output=True, check=False).returncode != 0
