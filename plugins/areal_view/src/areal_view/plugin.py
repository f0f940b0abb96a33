"""What this plugin supplies: the pages of a run, its logged tokens, and diagnostics. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins import Command, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_view.diagnostics import Diagnostics


_of_runs: dict[Path, Diagnostics] = {}


@hookimpl
def areal_step_finished(run_dir: Path, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Say once what the metrics show that is known to go wrong, and what to try; `diagnostics.jsonl` keeps it."""
    from areal_view.diagnostics import Diagnostics, keep

    if run_dir not in _of_runs:
        _of_runs[run_dir] = Diagnostics.of_run(run_dir, step)
    found = _of_runs[run_dir].add({"step": step, **metrics})
    keep(run_dir, step, found)
    return found


@hookimpl
def areal_batch_logged(run_dir: Path, step: int, batch: PackedBatch) -> None:
    """Keep the tokens of a few groups of each step, for `areal view` and for data frames."""
    from areal_view.recording import log_batch

    log_batch(run_dir, step, batch)


@hookimpl
def areal_run_finished(run_dir: Path, outcome: str) -> list[str]:
    """Write `report.html` when all steps are done, and say which half of the run waited for the other."""
    from areal_core.config import load_run
    from areal_view.balance import Split, bottleneck
    from areal_view.lines import is_metrics, read_lines
    from areal_view.page import write_report

    if outcome != "done":
        return []
    lines, _ = read_lines(run_dir / "metrics.jsonl", is_metrics)
    split = Split.of(load_run(run_dir).config)
    words = bottleneck(lines, split) if split is not None else ""
    write_report(run_dir)
    return [words] if words else []


@hookimpl
def areal_commands() -> list[Command]:
    """`areal view RUN_DIR`."""
    return [Command("view", "show a run: curves, rollouts token by token, timeline", target="areal_view.command:main")]
