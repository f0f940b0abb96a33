"""The report of a run: one HTML file with its curves and samples."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import CONFIG_FILE, load_run
from areal_core.errors import UsageError
from areal_view.page import render_page

if TYPE_CHECKING:
    from collections.abc import Sequence

REPORT_FILE = "report.html"


def main(words: Sequence[str]) -> int:
    """Write the report of a run, finished or not, and say where it lies: `areal view report RUN_DIR`."""
    parser = argparse.ArgumentParser(prog="areal view report", description="Write the HTML report of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    run_dir = parser.parse_args(words).run_dir
    path = write_report(run_dir)
    if path is None:
        raise UsageError(f"there is nothing to report: {run_dir} has no metrics yet")
    sys.stdout.write(f"{path}\n")
    return 0


def write_report(run_dir: Path) -> Path | None:
    """Write `report.html` into a run folder; its path, or None where the run has no metrics yet.

    Raises:
        UsageError: it is no run folder.
    """
    resolved = load_run(run_dir)
    lines = read_lines(run_dir / "metrics.jsonl")
    if not lines:
        return None
    samples = read_lines(run_dir / "samples.jsonl")
    config = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    path = run_dir / REPORT_FILE
    path.write_text(render_page(resolved.name, resolved.config.steps, lines, samples, config), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, empty where there is none; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
