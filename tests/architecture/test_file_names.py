"""Every file is named after its subject, and no work is left for later."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUBJECTLESS = {"utils", "util", "common", "helpers", "helper", "misc", "experimental"}


def python_files() -> list[Path]:
    """Return the Python files that git knows, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_or_folder_lacks_a_subject() -> None:
    names = {part.removesuffix(".py") for path in python_files() for part in path.parts}
    assert names & SUBJECTLESS == set()
    assert [name for name in sorted(names) if name.startswith("v2") or name.endswith("_v2")] == []


def test_nothing_is_left_to_do() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    unfinished = [path for path in python_files() if any(mark in (ROOT / path).read_text() for mark in marks)]
    assert unfinished == []
