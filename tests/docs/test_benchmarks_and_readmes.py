"""The programs that the benchmarks page names exist, and each plugin's page leads to its guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = sorted((ROOT / "plugins").glob("*/README.md"))


def test_every_benchmark_that_is_named_is_there() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:benchmarks/)?([a-z_]+\.py)\b", page))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / name).is_file()] == []


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.parent.name)
def test_a_readme_of_a_plugin_has_its_install_line_and_its_guide(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert f"pip install ./plugins/{page.parent.name}" in text
    (guide,) = re.findall(r"\]\((\.\./\.\./docs/(?:guides|extend)/[\w-]+\.md)\)", text)
    assert (page.parent / guide).is_file()
