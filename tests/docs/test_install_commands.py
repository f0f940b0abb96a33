"""Every page that shows an install command with pip also shows the uv form; the first pages name the systems."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = [ROOT / "README.md", ROOT / "docs" / "get-started.md"]
PAGES = [*FIRST, *sorted((ROOT / "docs" / "guides").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_with_pip_has_the_uv_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    uses_pip = re.search(r"(?<!uv )pip install", text)
    assert not uses_pip or "uv pip install" in text


def test_the_first_pages_name_the_supported_systems() -> None:
    readme, start = (page.read_text(encoding="utf-8") for page in FIRST)
    assert "You need Linux" in readme
    assert "](docs/get-started.md#supported-systems)" in readme
    section = start.partition("## Supported systems\n")[2]
    for system in ("x86-64", "arm64", "WSL2", "macOS", "Windows"):
        assert system in section
