"""What the terminal shows of a run: a line for each step, what the run waits for if there are none, and a summary.

It only receives messages of the processes, and takes no part in the run.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from areal_core.runtime.messages import RolloutStatus, StepMetrics
from areal_core.runtime.status import describe_phases

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.messages import RunStatus

PREPARATION_INTERVAL_S = 5.0
"""Seconds between two lines while the model is prepared."""
STEP_INTERVAL_S = 1.0
"""Seconds between two lines of steps. Lines of steps in between are left out."""
QUIET_S = 60.0
"""Seconds without a line after which one shows what the run waits for."""
RECENT_STEPS = 20
"""Steps whose mean duration gives the time that is left."""
GOALS: Final = (
    ("reward/all_episodes", "reward", ".3f"),
    ("reward/mean", "trained reward", ".3f"),
    ("train/negative_log_likelihood", "loss", ".4f"),
    ("train/loss", "loss", ".4f"),
)
"""What a run optimizes, with label and format. The first metric that a run has is shown. `reward/all_episodes` is
missing if no episode has finished since the last batch. `reward/mean` has another label because reward shaping and
group filters change it."""
MORE_HEADLINES: Final = (
    ("evaluation/reward", "held-out score", ".3f"),
    ("train/accuracy", "accuracy", ".3f"),
    ("train/teacher_kl", "teacher KL", ".4f"),
)
"""Metrics that are shown beside the goal, in the summary as well."""
STEP_DETAILS: Final = (
    ("episodes/failed", "failed episodes", ".0f"),
    ("staleness/mean", "staleness", ".2f"),
    ("batch/response_length", "length", ".1f"),
    ("train/entropy", "entropy", ".3f"),
)
"""Metrics that are shown in the line of a step only."""


class Progress:
    """Shows a line for each step, at most one a second. Steps with an evaluation and the last step are always shown.

    Args:
        run: its folder.
        steps: of the run.
        log: shows a line to the user.
    """

    def __init__(self, run: RunFolder, steps: int, log: Callable[[str], None]) -> None:
        self._run = run
        self._steps = steps
        self._log = log
        self._not_shown: deque[dict[str, Any]] = deque()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._rollout_status = ""
        self._began_at = time.monotonic()
        self._shown_at = 0.0

    def on_message(self, message: Any) -> None:
        """Take a message of a process. Messages about other subjects are ignored."""
        match message:
            case RolloutStatus(text):
                self._rollout_status = text
            case StepMetrics(line):
                self.add_step(dict(line))

    def add_step(self, metrics: dict[str, Any]) -> None:
        """Take the metrics of a finished step."""
        self._not_shown.append(metrics)
        self._step_seconds.append(metrics.get("time/step_s", 0.0))

    def drop_steps(self) -> None:
        """Drop the steps that are not shown yet: the run has gone back to its last checkpoint."""
        self._not_shown.clear()

    def update_preparation(self) -> None:
        """Show the progress of preparing the model. Call it a few times a second."""
        if time.monotonic() - self._shown_at > PREPARATION_INTERVAL_S:
            self._show(f"preparing the model  {preparation(self._run)}")

    def update(self, describe: Callable[[], RunStatus]) -> None:
        """Show new steps. Call it a few times a second.

        Args:
            describe: returns the status of the processes. It is called if nothing was shown for `QUIET_S` seconds.
        """
        while self._not_shown:
            metrics = self._not_shown.popleft()
            is_always_shown = metrics["step"] == self._steps or "evaluation/reward" in metrics
            if is_always_shown or time.monotonic() - self._shown_at > STEP_INTERVAL_S:
                self._show(step_line(metrics, self._steps) + self._time_left(metrics["step"]))
        if time.monotonic() - max(self._began_at, self._shown_at) > QUIET_S:
            phases = {name: process.phase for name, process in describe().processes.items()}
            self._show("; ".join(filter(None, [describe_phases(phases), self._rollout_status])) or "starting")

    def _time_left(self, step: int) -> str:
        left_s = (self._steps - step) * fmean(self._step_seconds)
        if left_s < 1:
            return ""
        return f"  {left_s / 3600:.1f} h left" if left_s > 7200 else f"  {left_s / 60:.1f} min left"

    def _show(self, line: str) -> None:
        self._shown_at = time.monotonic()
        self._log(line)


def preparation(run: RunFolder) -> str:
    """Return the last line that the process which prepares the model has written; empty without one."""
    log = run.log_path("model")
    if not log.is_file():
        return ""
    complete_lines = log.read_text(errors="replace").rpartition("\n")[0]
    return complete_lines.rpartition("\n")[2]


def step_line(metrics: dict[str, Any], steps: int) -> str:
    """Return one line of plain text about a step."""
    parts = [f"step {metrics['step']}/{steps}"]
    details = [detail for detail in STEP_DETAILS if detail[0] in metrics]
    parts += [f"{label} {metrics[key]:{form}}" for key, label, form in [*headlines(set(metrics)), *details]]
    if "time/step_s" in metrics and "batch/tokens" in metrics:
        parts.append(f"{metrics['batch/tokens'] / metrics['time/step_s']:,.0f} tokens/s")
    return "  ".join(parts)


def headlines(names: set[str]) -> list[tuple[str, str, str]]:
    """Return the metrics that say how well a run or a step does, each with its label and its format.

    A held-out score is a weighted sum: if it has several rewards, each of them is shown as well.

    Args:
        names: of the metrics that the run or the step has.
    """
    goals = [goal for goal in GOALS if goal[0] in names]
    others = [headline for headline in MORE_HEADLINES if headline[0] in names]
    reward_names = sorted(name for name in names if name.startswith("evaluation/reward/"))
    rewards = [(name, name.rpartition("/")[2], ".3f") for name in reward_names]
    return [*goals[:1], *others, *(rewards if len(rewards) > 1 else ())]


def summarize_run(run: RunFolder, steps: int, seconds: float, steps_before: int = 0) -> str:
    """Return a few lines about a run that has done all its steps: its first and last scores, and where its results are.

    A score is the mean over a tenth of the steps, because single batches vary more than a run gains in many steps.

    Args:
        run: its folder.
        steps: of the run.
        seconds: since this program has started it.
        steps_before: steps that it had done when this program resumed it.
    """
    metrics = run.read_metrics()
    of_them = f", the last {steps - steps_before} of them" if steps_before else ""
    lines = [f"done: {steps} steps{of_them} in {seconds:.0f} s"]
    for key, label, form in headlines({key for step in metrics for key in step}):
        values = [step[key] for step in metrics if key in step]
        count = max(1, len(values) // 10)
        first, last = fmean(values[:count]), fmean(values[-count:])
        lines.append(f"  {label:15s} {first:{form}} -> {last:{form}}")
    staleness = [step["staleness/mean"] for step in metrics if "staleness/mean" in step]
    if staleness:
        lines.append(f"  {'staleness':15s} {fmean(staleness):.2f} batches, mean of trained tokens")
    for path, label in ((run.model, "model"), (run.best, "best model"), (run.report, "report")):
        if path.exists():
            lines.append(f"  {label:15s} {path}")
    return "\n".join(lines)
