"""The lines that end a run on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.runs.folder import RunFolder


def summarise_run(run: RunFolder, steps: int, seconds: float) -> str:
    """What came of a run that has done all its steps: scores at its two ends, and where its results lie."""
    metrics = run.read_metrics()
    lines = [f"done: {steps} steps in {seconds:.0f} s"]
    for key, label in (("evaluation/reward", "held-out score"), ("reward/mean", "reward")):
        values = [line[key] for line in metrics if key in line]
        if values:
            lines.append(f"  {label:15s} {values[0]:.3f} -> {values[-1]:.3f}")
    staleness = [line["staleness/mean"] for line in metrics if "staleness/mean" in line]
    if staleness:
        lines.append(f"  {'staleness':15s} {sum(staleness) / len(staleness):.2f} batches, mean of trained tokens")
    for path, label in ((run.model, "model"), (run.best, "best model"), (run.report, "report")):
        if path.exists():
            lines.append(f"  {label:15s} {path}")
    return "\n".join(lines)
