"""TRL, verl and OpenRLHF as PyPI has them still compute what the docs say; `make others` writes the figures anew."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MEASURED = HERE.parents[1] / "docs" / "reference" / "other_implementations.json"
FIGURES = {"value", "largest_value", "gradient", "largest_gradient", "loss", "norm", "parameters", "moved"}
"""Keys of a row that may change a little from machine to machine: the program has tolerances for them."""


@pytest.mark.timeout(1800)
def test_the_comparisons_are_those_of_the_docs(others_python: str, tmp_path: Path) -> None:
    output = tmp_path / "measured.json"
    command = [others_python, str(HERE / "compare.py"), "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert _without_figures(output) == _without_figures(MEASURED), "write them anew: make others"


def _without_figures(path: Path) -> dict[str, Any]:
    measured = json.loads(path.read_text(encoding="utf-8"))
    del measured["minutes"]
    for table in ("functions", "trainers"):
        measured[table] = [{key: row[key] for key in row.keys() - FIGURES} for row in measured[table]]
    return measured
