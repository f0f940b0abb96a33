"""The page of other implementations shows what was measured, and every component, compared or not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
NEW = "write it anew: python docs/reference/write_pages.py"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the page."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    import other_implementations_page

    return other_implementations_page


def test_the_page_shows_what_was_measured(page: ModuleType) -> None:
    text = (REFERENCE / "other_implementations.md").read_text(encoding="utf-8")
    assert text.partition("\n")[2] == f"{page.page()}\n", NEW


def test_every_component_is_compared_or_said_not_to_be(page: ModuleType) -> None:
    components = {(kind, one.reference) for kind, found in page.components_by_kind().items() for one in found}
    measured = json.loads(page.MEASURED.read_text(encoding="utf-8"))
    rows = [*measured["functions"], *measured["trainers"]]
    compared = {(row["kind"], row["component"]) for row in rows}
    assert compared <= components, "a component of a row does not exist"
    text = page.page()
    for kind in page.KINDS:
        table = text.partition(f"## {kind.replace('_', ' ').capitalize()}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(rf"^\| \[`(.+?)`\].*{page.NOTHING_FOUND}", table, re.MULTILINE))
        assert shown == {name for where, name in components - compared if where == kind}
    assert [row for row in rows if row["problem"]] == []


def test_a_new_component_is_shown_without_a_comparison(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = page.components_by_kind()
    (one, *_) = listed["corrections"]
    new = type(one)("brand_new", "does something", "package.module:brand_new", plugin="grpo")
    monkeypatch.setattr(page, "components_by_kind", lambda: {**listed, "corrections": [*listed["corrections"], new]})
    assert f"`grpo/brand_new`](algorithms.md#grpobrand_new-correction) | {page.NOTHING_FOUND}" in page.page()
