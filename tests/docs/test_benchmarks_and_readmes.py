"""The benchmarks page names programs that are there; pages of plugins and the changelog stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = sorted((ROOT / "plugins").glob("*/README.md"))


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_every_benchmark_that_is_named_is_there() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:benchmarks/)?([a-z_]+\.py)\b", page))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / name).is_file()] == []


def test_pages_are_short() -> None:
    assert words(ROOT / "docs" / "benchmarks.md") <= 3000
    assert words(ROOT / "CHANGELOG.md") <= 1700
    assert sum(words(page) for page in (ROOT / "docs" / "guides").glob("*.md")) <= 8900


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.parent.name)
def test_a_readme_of_a_plugin_has_its_install_line_and_its_guide(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert words(page) <= 100
    assert f"pip install ./plugins/{page.parent.name}" in text
    (guide,) = re.findall(r"\]\((\.\./\.\./docs/guides/[\w-]+\.md)\)", text)
    assert (page.parent / guide).is_file()
