"""`areal doctor`: asks every health check in a process of its own, `python -m areal_core.checks.doctor PLUGIN NAME`.

All processes start at the same time. A check that crashes, hangs or prints cannot spoil the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.plugins import Finding, HealthCheck, PluginManager
from areal_core.runtime.process_tree import end_session
from areal_core.waiting import polls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.plugins.registration import Plugin

DEADLINE_S: Final = 120.0
"""Seconds for all checks of the machine together."""
MODEL_DEADLINE_S: Final = 900.0
"""Seconds for all checks of a model together. Most of them load it or make a copy."""
_POLL_S: Final = 0.1
"""Seconds between two tests whether processes have ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a health check.

    Attributes:
        check: name of the check, PLUGIN/NAME.
        meaning: what the check verifies.
        is_well: whether the check passed; None if it could not be tried.
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
        on_progress: called several times a second with how many checks have answered.
    """
    records = [record for plugin in plugins for _, record in plugin.records if isinstance(record, HealthCheck)]
    records = [record for record in records if record.of_model == (model is not None)]
    deadline_s = DEADLINE_S if model is None else MODEL_DEADLINE_S
    with tempfile.TemporaryDirectory(prefix="areal-doctor-") as folder:
        checks = [_Check.start(record, model, Path(folder, str(number))) for number, record in enumerate(records)]
        running = list(checks)
        try:
            for waited_s in polls(_POLL_S, deadline_s):
                on_progress(f"{len(checks) - len(running)} of {len(checks)} answers, {waited_s:.0f} s")
                for check in [check for check in running if check.process.poll() is not None]:
                    end_session(check.process)
                    running.remove(check)
                if not running:
                    break
        finally:
            for check in running:
                end_session(check.process)
        late = False, f"no answer within {deadline_s:g} s"
        findings = [late if check in running else check.read() for check in checks]
    return [
        Answer(record.reference, record.summary, is_well, text or "yes")
        for record, (is_well, text) in zip(records, findings, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Check:
    """A process that asks one health check. It writes to files, so that it never waits for a reader."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @classmethod
    def start(cls, record: HealthCheck, model: Path | None, path: Path) -> _Check:
        """Start the process. Its output goes to files of this path, with the suffixes `.out` and `.err`."""
        arguments = [record.plugin, record.name, *([] if model is None else [str(model)])]
        out, err = path.with_suffix(".out"), path.with_suffix(".err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        return cls(process, out, err)

    def read(self) -> tuple[bool | None, str]:
        """Return the finding in the last line of the output, after the process has ended."""
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in (self.out, self.err))
        try:
            is_well, text = json.loads(out.splitlines()[-1])
            return is_well, text
        except (IndexError, ValueError):
            last_lines = err.strip().splitlines()[-1:] or [f"ended with exit code {self.process.returncode}"]
            return False, last_lines[0]


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
