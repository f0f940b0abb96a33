"""Stop a run after a checkpoint, from any machine that can read its folder, and wait until it has stopped.

The exit code is 0 if the run stopped or was done, and 1 if it failed or did not stop in time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_error, print_out
from areal_core.cli.request import require_folder

if TYPE_CHECKING:
    import argparse

SUMMARY = "stop a run after a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal stop`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument(
        "--now", action="store_true", help="stop immediately without a checkpoint; only committed steps are kept"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="seconds to wait for the run to stop; 0 does not wait (default: 600)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Ask the run to stop, wait, and print the result. Return the exit code."""
    require_folder(arguments.run_dir)
    from areal_core.driver.resume_hint import resume_hint
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.status import stop_run

    run = RunFolder(arguments.run_dir.resolve())
    state = stop_run(run, now=arguments.now, patience_s=arguments.wait, log=print_error)
    if state == "running":
        print_out(f"asked to stop; follow it with: areal status {run.path}")
        return 0
    hint = resume_hint(run, has_failed=state == "failed")
    print_out(f"{state}; {hint}" if state != "done" else "done before it could be stopped")
    return 0 if state in ("interrupted", "done") or arguments.now else 1
