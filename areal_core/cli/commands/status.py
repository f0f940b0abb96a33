"""Say how a run is, from anywhere that sees its folder.

Exit code 0 where it runs or is done, 1 where it has failed, was interrupted or lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.cli.output import print_out
from areal_core.cli.request import require_folder

if TYPE_CHECKING:
    import argparse

SUMMARY = "show the status of a run"
NEXT = {
    "interrupted": "stopped after a checkpoint",
    "recovering": "goes back to its last checkpoint in a new attempt, by itself; where it does not",
    "failed": "ended with an error; its logs: {run}/logs",
    "lost": "its driver exited without a message",
    "unreachable": "its driver does not answer, and cannot be seen from here",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal status`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="write it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Look and print."""
    require_folder(arguments.run_dir)
    import json

    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.status import run_status

    run = RunFolder(arguments.run_dir.resolve())
    status = run_status(run)
    if arguments.json:
        print_out(json.dumps(status))
    else:
        for line in _lines(status, run.path):
            print_out(line)
    return 0 if status["state"] in ("running", "recovering", "done") else 1


def _lines(status: dict[str, Any], run: Path) -> list[str]:
    from areal_core.driver.resume_hint import resume_hint
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.status import waits_for

    state, since = status["state"], status["seconds_since_step"]
    of = "" if status["steps"] is None else f" of {status['steps']}"
    ago = "" if since is None or state != "running" else f", {since:.0f} s ago"
    lines = [f"{state}  step {status['step']}{of}{ago}  (attempt {status['attempt']})"]
    lines += [f"  {name:22s} {value:.4g}" for name, value in status["metrics"].items()]
    lines += [_finding(**finding) for finding in status["diagnostics"]]
    kept = status["checkpoint"]
    lines.append(f"  {'last checkpoint':22s} {'none' if kept is None else f'step {kept}'}")
    if state == "running":
        lines += [f"  {'ending':22s} {waits_for(status)}"] if status["is_ending"] else []
        lines.append(f"  {'driver':22s} process {status['pid']} on {status['host']}")
        lines += [f"  {name:22s} {_process(one)}" for name, one in status["processes"].items()]
    elif state in NEXT:
        now = "stopped before the first checkpoint" if state == "interrupted" and kept is None else NEXT[state]
        lines.append(f"{now.format(run=run)}; {resume_hint(RunFolder(run), has_failed=state == 'failed')}")
    return lines


def _finding(step: int, text: str) -> str:
    return f"  step {step}: {text}" if step else f"  note: {text}"


def _process(one: dict[str, Any]) -> str:
    """What a process does, where, and since when it was not heard."""
    silent = f"  silent for {one['silent_s']:.0f} s" if one["silent_s"] > 3 else ""
    address = f"  at {one['address']}" if one["address"] else ""
    return f"{one['phase']}  process {one['pid']} on {one['host']}{address}{silent}"
