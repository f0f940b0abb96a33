"""The report of a run: one HTML file with its curves and samples."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.cli.output import print_error, print_out
from areal_core.config import CONFIG_FILE, load_run
from areal_core.errors import UsageError
from areal_view.page import render_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPORT_FILE = "report.html"


def main(words: Sequence[str]) -> int:
    """Write the report of a run, finished or not, and say where it lies: `areal view report RUN_DIR`."""
    parser = argparse.ArgumentParser(prog="areal view report", description="Write the HTML report of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    run_dir = parser.parse_args(words).run_dir
    path = write_report(run_dir, print_error)
    if path is None:
        raise UsageError(f"there is nothing to report: {run_dir} has no metrics yet")
    print_out(str(path))
    return 0


def write_report(run_dir: Path, log: Callable[[str], None] = lambda _: None) -> Path | None:
    """Write `report.html` into a run folder; its path, or None where the run has no metrics yet.

    Args:
        run_dir: the folder.
        log: takes a sentence on the lines that cannot be read; it stands on the page as well.

    Raises:
        UsageError: it is no run folder.
    """
    resolved = load_run(run_dir)
    lines, odd_lines = read_lines(run_dir / "metrics.jsonl", is_metrics)
    samples, odd_samples = read_lines(run_dir / "samples.jsonl", is_group)
    note = ""
    if odd_lines or odd_samples:
        note = f"{odd_lines} lines of metrics.jsonl and {odd_samples} of samples.jsonl cannot be read and are left out"
        log(note)
    if not lines:
        return None
    config = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    path = run_dir / REPORT_FILE
    page = render_page(resolved.name, resolved.config.steps, lines, samples, config, note and f"; {note}")
    path.write_text(page, encoding="utf-8")
    return path


def read_lines(path: Path, is_whole: Callable[[Any], bool]) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines of a file, and how many of them cannot be read; nothing where there is no file."""
    written = path.read_bytes().splitlines() if path.is_file() else []
    read = [line for line in map(_parsed, written) if is_whole(line)]
    return read, len(written) - len(read)


def is_metrics(line: Any) -> bool:
    """Whether a line holds a step and numbers, as those of `metrics.jsonl` do."""
    return isinstance(line, dict) and "step" in line and all(isinstance(value, int | float) for value in line.values())


def is_group(line: Any) -> bool:
    """Whether a line holds a version and its episodes, as those of `samples.jsonl` do."""
    try:
        return bool(line["version"] >= 0 and all(f"{one['text'] + ''}{one['reward']:.2f}" for one in line["episodes"]))
    except (LookupError, TypeError, ValueError):
        return False


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
