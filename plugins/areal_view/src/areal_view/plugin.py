"""Hooks of this plugin: the page of a run, and the log of its tokens. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data import PackedBatch


@hookimpl
def areal_batch_logged(run_dir: Path, step: int, batch: PackedBatch) -> None:
    """Log the tokens of a few groups of each step, for `areal view` and for data frames."""
    from areal_view.recording import log_batch

    log_batch(run_dir, step, batch)


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> None:
    """Write `report.html` when all steps are done."""
    from areal_view.page import write_report

    if outcome == "done":
        write_report(run_dir)


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal view`."""
    return [Command("view", "show a run: metrics, rollouts token by token, timeline", target="areal_view.command:main")]
