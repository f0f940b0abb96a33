"""`areal doctor`: asks every health check in a process of its own, `python -m areal_core.checks.doctor PLUGIN NAME`.

All processes start at the same time. A check that crashes, hangs or prints cannot spoil the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.plugins import Finding, HealthCheck, PluginManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.plugins.registration import Plugin

DEADLINE_S: Final = 120.0
"""Seconds for all checks of the machine together."""
MODEL_DEADLINE_S: Final = 900.0
"""Seconds for all checks of a model together. Most of them load it or make a copy."""
_PROGRESS_INTERVAL_S: Final = 1.0
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a health check.

    Attributes:
        check: name of the check, PLUGIN/NAME.
        meaning: what it means that the check is well.
        is_well: whether it is; None if it could not be tried.
        text: what the check found.
    """

    check: str
    meaning: str
    is_well: bool | None
    text: str


def check_installed(plugins: Sequence[Plugin]) -> list[Answer]:
    """Return for each plugin whether it can be loaded and has what it requires."""
    answers = []
    for plugin in plugins:
        installed = plugin.installed
        faults = [str(plugin.cause)] if plugin.cause else installed.unmet()
        text = "; ".join(faults) or f"{installed.distribution} {installed.version}"
        meaning = "it can be loaded, and what it requires is installed"
        answers.append(Answer(f"plugin {installed.name}", meaning, not faults, text))
    return answers


def ask_health_checks(
    plugins: Sequence[Plugin], model: Path | None = None, on_progress: Callable[[str], None] = lambda _: None
) -> list[Answer]:
    """Ask all health checks of plugins.

    Args:
        plugins: the core and installed plugins.
        model: folder of a model, for the checks of a model; None for those of the machine.
        on_progress: called about every second with how many checks have answered.
    """
    records = [record for plugin in plugins for _, record in plugin.records if isinstance(record, HealthCheck)]
    records = [record for record in records if record.of_model == (model is not None)]
    deadline_s = DEADLINE_S if model is None else MODEL_DEADLINE_S
    started_at = time.monotonic()
    processes = [_start(record, model) for record in records]
    answers: list[Answer] = []
    try:
        for record, process in zip(records, processes, strict=True):

            def report_progress() -> None:
                passed_s = time.monotonic() - started_at
                on_progress(f"{len(answers)} of {len(processes)} answers, {passed_s:.0f} s")

            is_well, text = _read_answer(process, started_at + deadline_s, report_progress, deadline_s)
            answers.append(Answer(record.reference, record.summary, is_well, text or "yes"))
    finally:
        for process in processes:
            end_tree(process)
    return answers


def _start(record: HealthCheck, model: Path | None) -> subprocess.Popen[str]:
    arguments = [record.plugin, record.name, *([] if model is None else [str(model)])]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
    )  # fmt: skip


def _read_answer(
    process: subprocess.Popen[str], deadline: float, report_progress: Callable[[], None], deadline_s: float
) -> tuple[bool | None, str]:
    """Wait for a process and return the finding that it wrote in its last line."""
    while True:
        report_progress()
        remaining_s = deadline - time.monotonic()
        try:
            out, err = process.communicate(timeout=max(0.0, min(_PROGRESS_INTERVAL_S, remaining_s)))
            break
        except subprocess.TimeoutExpired:
            if remaining_s <= 0:
                return False, f"no answer within {deadline_s:g} s"
    try:
        is_well, text = json.loads(out.splitlines()[-1])
        return is_well, text
    except (IndexError, ValueError):
        last_lines = err.strip().splitlines()[-1:] or [f"ended with exit code {process.returncode}"]
        return False, last_lines[0]


def end_tree(process: subprocess.Popen[str]) -> None:
    """Kill the process of a check with the processes that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _answer(plugin: str, name: str, *folder: str) -> None:
    """Call a health check and write its finding, in the process of the check."""
    from areal_core.models.small_copy import NotTriedError

    manager = PluginManager.load([plugin])
    record = next(record for kind, record in manager.records() if kind == "health_checks" and record.name == name)
    assert isinstance(record, HealthCheck)
    target: Any = manager.import_from(record, record.target)
    try:
        result = target(*map(Path, folder))
    except NotTriedError as reason:
        result = Finding(None, f"not tried: {reason}")
    if not isinstance(result, Finding):
        result = Finding(result is None, "" if result is None else str(result))
    sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    _answer(*sys.argv[1:])
