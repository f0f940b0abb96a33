"""docs/algorithms.md is what docstrings and settings say, and each part says where it is from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "algorithms_page.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    written = (ROOT / "docs" / "algorithms.md").read_text()
    assert written == made, "write it anew: python docs/algorithms_page.py > docs/algorithms.md"


def test_every_link_of_its_index_leads_to_a_heading() -> None:
    written = (ROOT / "docs" / "algorithms.md").read_text()
    found = re.findall(r"^### `(.+?)` (.+)$", written, re.MULTILINE)
    headings = {f"{name}-{kind}".replace("/", "").replace(" ", "-") for name, kind in found}
    assert len(headings) == len(found)
    linked = set(re.findall(r"\(#(.+?)\)", written.partition("\n## ")[0]))
    assert linked == headings
