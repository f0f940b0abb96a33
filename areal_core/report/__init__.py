"""The report of a run: one HTML file with its curves and samples, and the lines that end it on the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_core.report.page import render_page

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import Resolved


def finish_run(resolved: Resolved, run_dir: Path, seconds: float) -> str:
    """Write `report.html` where the config asks for it, and say what came of the run."""
    lines = read_lines(run_dir / "metrics.jsonl")
    if resolved.config.report and lines:
        samples = read_lines(run_dir / "samples.jsonl")
        page = render_page(resolved.name, resolved.config.steps, lines, samples, resolved.to_yaml())
        (run_dir / "report.html").write_text(page)
    told = [f"done: {resolved.config.steps} steps in {seconds:.0f} s"]
    for key, label in (("evaluation/reward", "held-out score"), ("reward/mean", "reward")):
        values = [line[key] for line in lines if key in line]
        if values:
            told.append(f"  {label:15s} {values[0]:.3f} -> {values[-1]:.3f}")
    staleness = [line["staleness/mean"] for line in lines if "staleness/mean" in line]
    if staleness:
        told.append(f"  {'staleness':15s} {sum(staleness) / len(staleness):.2f} batches, mean of trained tokens")
    for name, label in (("model", "model"), ("best", "best model"), ("report.html", "report")):
        if (run_dir / name).exists():
            told.append(f"  {label:15s} {run_dir / name}")
    return "\n".join(told) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, empty where there is none; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
