"""What this plugin supplies: diagnostics while a run goes on, the report at its end. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_view.diagnostics import Diagnostics


_of_runs: dict[Path, Diagnostics] = {}


@hookimpl
def areal_step_finished(run_dir: Path, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Say once what the metrics show that is known to go wrong, and what to try."""
    from areal_view.diagnostics import Diagnostics

    if run_dir not in _of_runs:
        _of_runs[run_dir] = Diagnostics.of_run(run_dir, step)
    return _of_runs[run_dir].add({"step": step, **metrics})


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> list[str]:
    """Write `report.html` when all steps are done, and say which half of the run waited for the other."""
    from areal_core.config import load_run
    from areal_view.balance import Split, bottleneck
    from areal_view.report import is_metrics, read_lines, write_report

    if outcome != "done":
        return []
    lines, _ = read_lines(run_dir / "metrics.jsonl", is_metrics)
    words = bottleneck(lines, Split.of(load_run(run_dir).config))
    write_report(run_dir)
    return [words] if words else []


@hookimpl
def areal_commands() -> list[Command]:
    """`areal view report RUN_DIR`."""
    return [Command("report", "write the HTML report of a run", target="areal_view.report:main")]
