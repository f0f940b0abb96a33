"""What the terminal shows while a run goes on: lines of its steps, and of what is waited for where there are none.

It is told what the processes say and takes no part in the run.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from areal_core.driver.describing import describe_phases
from areal_core.driver.summary import headlines
from areal_core.messages.hub import Status, StepMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.messages.hub import Driving
    from areal_core.runs.folder import RunFolder

PREPARATION_INTERVAL_S = 5.0
QUIET_S = 60.0
"""After which a line says what is waited for."""
RECENT_STEPS = 20


class View:
    """A line for each step, at most one a second, but for those with an evaluation and the last.

    Args:
        run: its folder.
        steps: of the run.
        log: shows a line to the user.

    Attributes:
        log: shows a line to the user.
    """

    def __init__(self, run: RunFolder, steps: int, log: Callable[[str], None]) -> None:
        self._run, self._steps, self.log = run, steps, log
        self._new: deque[dict[str, Any]] = deque()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._status = ""
        self._began, self._printed = time.monotonic(), 0.0

    def add(self, line: dict[str, Any]) -> None:
        """A step is over."""
        self._new.append(line)
        self._seconds.append(line.get("time/step_s", 0.0))

    def on_message(self, said: Any) -> None:
        """What processes say that is for whoever watches."""
        match said:
            case Status(text):
                self._status = text
            case StepMetrics(line):
                self.add(dict(line))

    def begin_again(self) -> None:
        """The run has gone back to its last checkpoint."""
        self._new.clear()

    def prepare(self) -> None:
        """Say now and then how the preparation of the model goes; called a few times a second."""
        if time.monotonic() - self._printed > PREPARATION_INTERVAL_S:
            self._print(f"preparing the model  {preparation(self._run)}")

    def update(self, describe: Callable[[], Driving]) -> None:
        """Show what is new; called a few times a second.

        Args:
            describe: how the processes are now, asked where nothing was shown for long.
        """
        while self._new:
            line = self._new.popleft()
            is_last = line["step"] == self._steps
            if is_last or "evaluation/reward" in line or time.monotonic() - self._printed > 1:
                self._print(summary_line(line, self._steps) + self._left(line["step"]))
        if time.monotonic() - max(self._began, self._printed) > QUIET_S:
            phases = {name: process.phase for name, process in describe().processes.items()}
            self._print("; ".join(filter(None, [describe_phases(phases), self._status])) or "starting")

    def _left(self, step: int) -> str:
        left = (self._steps - step) * sum(self._seconds) / len(self._seconds)
        return "" if left < 1 else f"  {left / 3600:.1f} h left" if left > 7200 else f"  {left / 60:.1f} min left"

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self.log(line)


def preparation(run: RunFolder) -> str:
    """What the process that prepares the model said last."""
    log = run.log_path("model")
    return log.read_text(errors="replace").rpartition("\n")[0].rpartition("\n")[2] if log.is_file() else ""


def summary_line(line: dict[str, Any], steps: int) -> str:
    """One step in one line of plain text."""
    parts = [f"step {line['step']}/{steps}"]
    parts += [f"{label} {line[key]:{form}}" for key, label, form in headlines(set(line))]
    for key, label, form in (
        ("episodes/failed", "failed episodes", ".0f"),
        ("staleness/mean", "staleness", ".2f"),
        ("batch/response_length", "length", ".1f"),
        ("train/entropy", "entropy", ".3f"),
    ):
        if key in line:
            parts.append(f"{label} {line[key]:{form}}")
    if "time/step_s" in line and "batch/tokens" in line:
        parts.append(f"{line['batch/tokens'] / line['time/step_s']:,.0f} tokens/s")
    return "  ".join(parts)
