"""The lines that end a run on the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def summarise_run(run_dir: Path, steps: int, seconds: float) -> str:
    """What came of a run that has done all its steps: scores at its two ends, and where its results lie."""
    metrics = _read_metrics(run_dir / "metrics.jsonl")
    lines = [f"done: {steps} steps in {seconds:.0f} s"]
    for key, label in (("evaluation/reward", "held-out score"), ("reward/mean", "reward")):
        values = [line[key] for line in metrics if key in line]
        if values:
            lines.append(f"  {label:15s} {values[0]:.3f} -> {values[-1]:.3f}")
    staleness = [line["staleness/mean"] for line in metrics if "staleness/mean" in line]
    if staleness:
        lines.append(f"  {'staleness':15s} {sum(staleness) / len(staleness):.2f} batches, mean of trained tokens")
    for name, label in (("model", "model"), ("best", "best model"), ("report.html", "report")):
        if (run_dir / name).exists():
            lines.append(f"  {label:15s} {run_dir / name}")
    return "\n".join(lines)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, empty where there is none; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
