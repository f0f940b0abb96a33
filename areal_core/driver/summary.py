"""What the terminal shows of a run's metrics first of all, and the lines that end a run there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from areal_core.runs.folder import RunFolder

GOALS: Final = (
    ("reward/all_episodes", "reward", ".3f"),
    ("reward/mean", "trained reward", ".3f"),
    ("train/negative_log_likelihood", "loss", ".4f"),
    ("train/loss", "loss", ".4f"),
)
"""What a run is after, with labels and formats: the first that it has is shown. `reward/all_episodes` is missing where
no episode finished since the last batch; `reward/mean` has another label: shaping and filters change it."""
OTHERS: Final = (
    ("evaluation/reward", "held-out score", ".3f"),
    ("train/accuracy", "accuracy", ".3f"),
    ("train/teacher_kl", "teacher KL", ".4f"),
)
"""What is shown beside it."""


def headlines(metrics: set[str]) -> list[tuple[str, str, str]]:
    """Of the metrics that a run or a step has, those that say how well it does, each with its label and format: a score
    is a weighted sum, so that several rewards are shown each."""
    goals = [goal for goal in GOALS if goal[0] in metrics]
    each = [(key, key.rpartition("/")[2], ".3f") for key in sorted(metrics) if key.startswith("evaluation/reward/")]
    return [*goals[:1], *(one for one in OTHERS if one[0] in metrics), *(each if len(each) > 1 else ())]


def summarize_run(run: RunFolder, steps: int, seconds: float, before: int = 0) -> str:
    """What came of a run that has done all its steps: scores at its two ends, and where its results lie."""
    metrics = run.read_metrics()
    here = f", the last {steps - before} of them" if before else ""
    lines = [f"done: {steps} steps{here} in {seconds:.0f} s"]
    for key, label, form in headlines({key for line in metrics for key in line}):
        values = [line[key] for line in metrics if key in line]
        lines.append(f"  {label:15s} {values[0]:{form}} -> {values[-1]:{form}}")
    staleness = [line["staleness/mean"] for line in metrics if "staleness/mean" in line]
    if staleness:
        lines.append(f"  {'staleness':15s} {sum(staleness) / len(staleness):.2f} batches, mean of trained tokens")
    for path, label in ((run.model, "model"), (run.best, "best model"), (run.report, "report")):
        if path.exists():
            lines.append(f"  {label:15s} {path}")
    return "\n".join(lines)
