"""Compare the ledger of a run with what its trainer says it has trained on.

Exit code 0 if they agree and every prompt is accounted for, 1 if not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse

SUMMARY = "check that a run lost and repeated nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal audit`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Hand the folder to the audit."""
    if not arguments.run_dir.is_dir():
        raise UsageError(f"there is no run folder {arguments.run_dir}")
    from areal_core.ledger.audit import main

    return main(arguments.run_dir, arguments.json)
