"""What the terminal shows while a run goes on: a live panel, or plain lines where there is no terminal.

It is told what the processes say and takes no part in the run. It says what to write, and the terminal's own thread
writes it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.driver.describing import describe_phases
from areal_core.driver.summary import headlines
from areal_core.driver.terminal import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

    from areal_core.config import Resolved
    from areal_core.driver.terminal import Terminal
    from areal_core.messages.hub import Driving
    from areal_core.runs.folder import RunFolder

PREPARATION_INTERVAL_S = 5.0
SEEN_EVERY_S = 1.0
"""How often all processes are looked at; there may be thousands."""
KEPT_STEPS = 1000
"""Of which the curves are drawn; a run may go on for weeks."""
QUIET_S = 60.0
"""After which a line says what is waited for."""
SPARKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Shows the state of a run."""

    def prepare(self) -> None:
        """Look at how the preparation of the model goes; called a few times a second."""

    def update(self) -> None:
        """Show how the run is now; called a few times a second."""


class RunState:
    """A run as its processes tell it: the metrics of its last steps, and how each role is now.

    Args:
        run: its folder.
        log: shows a line to the user.

    Attributes:
        log: shows a line to the user.
        lines: of metrics, one for each of the last steps.
        statuses: by role what it last said.
        phases: by process what it is doing.
    """

    def __init__(self, run: RunFolder, log: Callable[[str], None] = log) -> None:
        self._run = run
        self.log = log
        self._new: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.statuses: dict[str, dict[str, Any]] = {}
        self.phases: Mapping[str, str] = {}
        self._seen = -math.inf

    @property
    def is_old(self) -> bool:
        """Whether it is time to see again how the run is."""
        return time.monotonic() - self._seen > SEEN_EVERY_S

    def see(self, driving: Driving) -> None:
        """How the run's processes are now."""
        self._seen = time.monotonic()
        self.phases = {name: process.phase for name, process in driving.processes.items()}

    def begin_again(self) -> None:
        """The run has gone back: its metrics are read again, as far as they count."""
        self.lines.clear()
        self._new.clear()
        self.statuses.clear()

    def add(self, line: dict[str, Any]) -> None:
        """A step is over."""
        self.lines.append(line)
        self._new.append(line)

    def on_message(self, role: str, status: dict[str, Any]) -> None:
        """A role says how it is; the trainer's first word comes after it has cut the metrics to what counts."""
        if role == "trainer" and role not in self.statuses:
            self.lines.extend(self._run.read_metrics())
        self.statuses[role] = status

    def take_new(self) -> list[dict[str, Any]]:
        """Metrics lines that are new since the last call."""
        new = list(self._new)
        self._new.clear()
        return new

    def preparation(self) -> str:
        """What the process that prepares the model said last."""
        log = self._run.log_path("model")
        return log.read_text(errors="replace").rpartition("\n")[0].rpartition("\n")[2] if log.is_file() else ""

    def series(self, key: str) -> list[float]:
        """The values of one metric over the steps that have it."""
        return [line[key] for line in self.lines if key in line]


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


class PlainView:
    """A line for each step, or for every tenth of the run where steps are many and quick."""

    def __init__(self, state: RunState, steps: int, log: Callable[[str], None] = log) -> None:
        self._state = state
        self._show = log
        self._steps = steps
        self._began, self._printed = time.monotonic(), 0.0

    def prepare(self) -> None:
        """See `View.prepare`."""
        if time.monotonic() - self._printed > PREPARATION_INTERVAL_S:
            self._log(f"preparing the model  {self._state.preparation()}")

    def update(self) -> None:
        """See `View.update`."""
        for line in self._state.take_new():
            is_last = line["step"] == self._steps
            if is_last or "evaluation/reward" in line or time.monotonic() - self._printed > 1:
                self._log(summary_line(line, self._steps))
        if time.monotonic() - max(self._began, self._printed) > QUIET_S:
            said = [str(text) for text in self._state.statuses.get("controller", {}).values()]
            self._log("; ".join(filter(None, [describe_phases(self._state.phases), *said])) or "starting")

    def _log(self, line: str) -> None:
        self._printed = time.monotonic()
        self._show(line)


class LiveView:
    """A panel that is drawn anew a few times a second."""

    def __init__(self, state: RunState, resolved: Resolved, terminal: Terminal) -> None:
        from rich.live import Live

        self._state = state
        self._title = resolved.name
        self._steps = resolved.config.steps
        self._began = time.monotonic()
        self._terminal = terminal
        self._failure: Exception | None = None
        self._live = Live(self._panel(), auto_refresh=False)

    def close(self) -> None:
        """Leave the last panel on the screen."""
        panel = self._panel()

        def leave() -> None:
            self._refresh(panel)
            self._live.stop()

        self._draw(leave)

    def prepare(self) -> None:
        """See `View.prepare`."""
        from rich.panel import Panel
        from rich.text import Text

        message = f"preparing the model ({time.monotonic() - self._began:.0f} s)\n{self._state.preparation()}"
        self._show(Panel(Text(message), title=Text(f"areal · {self._title}"), expand=False, width=100))

    def update(self) -> None:
        """See `View.update`."""
        self._show(self._panel())

    def _show(self, panel: RenderableType) -> None:
        if self._failure is not None:
            raise self._failure
        self._draw(lambda: self._refresh(panel))

    def _refresh(self, panel: RenderableType) -> None:
        """In the terminal's thread."""
        self._live.start()
        self._live.update(panel, refresh=True)

    def _draw(self, draw: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                draw()
            except Exception as error:  # noqa: BLE001 - told by the next `update`
                self._failure = error

        self._terminal.draw(guarded)

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step = self._state.lines[-1]["step"] if self._state.lines else 0
        table = Table.grid(padding=(0, 2))
        for label, text in self._rows():
            table.add_row(Text(label, style="bold"), Text(text))  # what is shown is not a markup
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self._steps, completed=step, width=60))
        return Panel(
            Group(bar, table), title=Text(f"areal · {self._title} · step {step}/{self._steps}"), expand=False, width=100
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        state = self._state
        for key, label, form in (
            *headlines({key for line in state.lines for key in line}),
            ("batch/response_length", "length", ".3f"),
            ("train/entropy", "entropy", ".3f"),
        ):
            if values := state.series(key):
                yield label, f"{values[-1]:8{form}}  {sparkline(values)}"
        if not state.lines:
            yield "phase", f"starting ({time.monotonic() - self._began:.0f} s)"
            yield "processes", describe_phases(state.phases)
            yield from state.statuses.get("controller", {}).items()
            return
        last = state.lines[-1]
        if "staleness/mean" in last:
            yield "staleness", f"{last['staleness/mean']:8.2f}  at most {last['staleness/max']:.0f} batches"
        recent = [line for line in list(state.lines)[-10:] if "batch/tokens" in line]
        if recent:
            seconds = sum(line["time/step_s"] for line in recent) or math.inf
            rates = [sum(line[key] for line in recent) / seconds for key in ("batch/tokens", "batch/sequences")]
            yield "speed", f"{rates[0]:8,.0f}  tokens/s, {rates[1]:,.0f} samples/s trained on"
            yield "waiting", waiting_verdict(recent)
            left = (self._steps - last["step"]) * seconds / len(recent)
            yield "left", f"{left / 60:8.1f}  minutes"
        yield "trainer", state.phases.get("trainer-0", "")
        for label, text in state.statuses.get("controller", {}).items():
            yield label, str(text)


def waiting_verdict(lines: list[dict[str, Any]]) -> str:
    """Who waits for whom, from the share of a step that the trainer spends waiting for rollouts."""
    waited = sum(line.get("time/wait_s", 0.0) for line in lines) / max(1e-9, sum(line["time/step_s"] for line in lines))
    side = "the trainer waits for rollouts" if waited > 0.5 else "rollouts wait for the trainer"
    verdict = side if waited > 0.5 or waited < 0.1 else "in balance"
    return f"{100 * waited:7.0f}%  of the trainer's time for rollouts: {verdict}"


def sparkline(values: list[float], width: int = 50) -> str:
    """A small curve of the values, each column the mean of its share."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(SPARKS[int((value - low) / (high - low or 1) * (len(SPARKS) - 1))] for value in means)


class LastingView:
    """Shows through the first of several views that can: nothing that shows may end what works.

    Args:
        views: the best one first.
        log: shows a line to the user.
    """

    def __init__(self, views: list[View], log: Callable[[str], None] = log) -> None:
        self._views = views
        self._log = log

    def prepare(self) -> None:
        """See `View.prepare`."""
        self._show(lambda view: view.prepare())

    def update(self) -> None:
        """See `View.update`."""
        self._show(lambda view: view.update())

    def _show(self, show: Callable[[View], None]) -> None:
        while self._views:
            try:
                show(self._views[0])
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                failed = self._views.pop(0)
                self._log(
                    f"{type(failed).__name__} failed and is left out: {type(error).__name__}: {error}; the run goes on"
                )
            else:
                return


@contextmanager
def open_view(resolved: Resolved, state: RunState, terminal: Terminal) -> Iterator[View]:
    """The live panel on a terminal, plain lines elsewhere."""
    plain = PlainView(state, resolved.config.steps, terminal.log)
    live = LiveView(state, resolved, terminal) if sys.stdout.isatty() else None
    view = LastingView([plain] if live is None else [live, plain], terminal.log)
    try:
        yield view
        view.update()
    finally:
        if live is not None:
            live.close()
