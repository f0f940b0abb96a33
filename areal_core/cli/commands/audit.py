"""Compare the ledger of a run with the batches that its trainer reports as trained on.

If the run is in progress, its trainer is asked. The exit code is 0 if they agree and every prompt is accounted for,
otherwise 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_out
from areal_core.cli.request import require_folder

if TYPE_CHECKING:
    import argparse

SUMMARY = "check that no data was lost or repeated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal audit`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Audit the run and print the report. Return 0 if everything agrees, else 1."""
    require_folder(arguments.run_dir)
    import json

    from areal_core.driver.auditing import audit_run

    report = audit_run(arguments.run_dir.resolve())
    if arguments.json:
        print_out(json.dumps(report))
    else:
        print_out(f"committed step: {report['committed_step']}")
        for state, count in sorted(report["groups"].items()):
            print_out(f"  {state:20s} {count:8,d} groups")
        if provisional := report["provisional"]:
            print_out(f"  of those consumed, {provisional:,d} are behind that step: a resume trains on them again")
        for problem in report["problems"]:
            print_out(f"problem: {problem}")
        if not report["problems"]:
            print_out("clean: every group has one outcome, and ledger, trainer and data set agree")
    return 1 if report["problems"] else 0
