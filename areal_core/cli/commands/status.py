"""Show the status of a run, from any machine that can read its folder.

The exit code is 0 if the run is in progress or done, and 1 if it failed, was interrupted or is lost.
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
    """Declare the arguments of `areal status`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument("--json", action="store_true", help="print the status as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read the status of the run and print it. Return the exit code."""
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
    lines += [_describe_diagnostic(**diagnostic) for diagnostic in status["diagnostics"]]
    checkpoint = status["checkpoint"]
    lines.append(f"  {'last checkpoint':22s} {'none' if checkpoint is None else f'step {checkpoint}'}")
    if state == "running":
        lines += [f"  {'ending':22s} {waits_for(status)}"] if status["is_ending"] else []
        lines.append(f"  {'driver':22s} process {status['pid']} on {status['host']}")
        lines += [f"  {name:22s} {_describe_process(process)}" for name, process in status["processes"].items()]
    elif state in NEXT:
        is_without_checkpoint = state == "interrupted" and checkpoint is None
        description = "stopped before the first checkpoint" if is_without_checkpoint else NEXT[state]
        lines.append(f"{description.format(run=run)}; {resume_hint(RunFolder(run), has_failed=state == 'failed')}")
    return lines


def _describe_diagnostic(step: int, text: str) -> str:
    return f"  step {step}: {text}" if step else f"  note: {text}"


def _describe_process(process: dict[str, Any]) -> str:
    """Return a process's phase, where it runs, and for how long it has been silent if that is above 3 seconds."""
    silent = f"  silent for {process['silent_s']:.0f} s" if process["silent_s"] > 3 else ""
    address = f"  at {process['address']}" if process["address"] else ""
    return f"{process['phase']}  process {process['pid']} on {process['host']}{address}{silent}"
