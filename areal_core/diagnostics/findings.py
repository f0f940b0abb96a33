"""`diagnostics.jsonl`: a JSON line with `step` and `text` for each finding of a run; notes before it have step 0."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from areal_core.diagnostics.balance import Split
from areal_core.diagnostics.conditions import Diagnostics
from areal_core.disk import append_line, read_steps, replace_durably
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig

FINDINGS_FILE: Final = "diagnostics.jsonl"


def read_findings(run_dir: Path) -> list[dict[str, Any]]:
    """Return the findings of a run, each with `step` and `text`. Notes of the start come first, with step 0.

    Args:
        run_dir: the run folder. Without a file of findings the list is empty.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.programs import read_findings
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     line = '{"step": 3, "text": "every answer was cut off"}'
        ...     _ = (Path(folder) / "diagnostics.jsonl").write_text(f"{line}\\n")  # as a run writes it
        ...     read_findings(Path(folder))
        [{'step': 3, 'text': 'every answer was cut off'}]
    """
    found = [line for line in read_steps(run_dir / FINDINGS_FILE) if isinstance(line.get("text"), str)]
    return sorted(found, key=lambda line: line["step"])


def write_notes(run_dir: Path, notes: Iterable[str]) -> None:
    """Write what is to be noted before a run starts or resumes, in place of the notes of an earlier start."""
    later = [line for line in read_findings(run_dir) if line["step"]]
    _write(run_dir, [*({"step": 0, "text": note} for note in notes), *later])


def _write(run_dir: Path, findings: Iterable[Mapping[str, Any]]) -> None:
    with suppress(OSError):  # a full disk costs the findings and never the run
        text = "".join(f"{json.dumps(line)}\n" for line in findings)
        replace_durably(run_dir / FINDINGS_FILE, text.encode())


class Watch:
    """Watches the metrics of a run, and writes and shows each finding once, also where the run was resumed.

    Args:
        run_dir: its folder.
        config: of the run.
        step: that the run starts from; findings of later steps belong to a discarded history and are removed.
        log: shows a line to the user.
        former: the metrics that the run has written before; those of later steps are left out.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        step: int,
        log: Callable[[str], None],
        former: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._run_dir, self._log = run_dir, log
        self._diagnostics = Diagnostics(Split.of(config), config.rollout)
        self._has_failed = False
        self._step = step
        for line in former:
            if line["step"] <= step and all(isinstance(value, int | float) for value in line.values()):
                self._new_texts(line)
        findings = read_findings(run_dir)
        if kept := [line for line in findings if line["step"] > step]:
            _write(run_dir, [line for line in findings if line not in kept])

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the metrics of the next step, with its number as `step`."""
        self._step = line["step"]
        for text in self._new_texts(line):
            self.note(line["step"], text)

    def note_now(self, text: str) -> None:
        """Write and show a finding about the latest step."""
        self.note(max(1, self._step), text)

    def note(self, step: int, text: str) -> None:
        """Write and show a finding about a step. A disk that refuses costs the written line only."""
        with suppress(RunError):
            append_line("the diagnostics", self._run_dir / FINDINGS_FILE, json.dumps({"step": step, "text": text}))
        self._log(f"step {step}: {text}")

    def _new_texts(self, line: Mapping[str, Any]) -> list[str]:
        """Return what a line of metrics shows. Log the first failure of a condition: none may end the trainer, which
        calls this method."""
        try:
            return self._diagnostics.add(line)
        except Exception as error:  # noqa: BLE001 - metrics come from components of any kind
            if not self._has_failed:
                self._log(f"step {line['step']}: the diagnostics of the metrics failed: {error!r}")
            self._has_failed = True
            return []
