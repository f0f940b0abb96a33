"""What this plugin supplies: the report at the end of a run, and the command that makes one. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, hookimpl

if TYPE_CHECKING:
    from pathlib import Path


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Write `report.html` when all steps are done."""
    from areal_view.report import write_report

    if outcome == "done":
        write_report(run_dir)


@hookimpl
def areal_commands() -> list[Command]:
    """`areal view report RUN_DIR`."""
    return [Command("report", "write the HTML report of a run", target="areal_view.report:main")]
