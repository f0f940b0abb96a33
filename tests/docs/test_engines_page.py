"""The matrix of inference engines changes with the checks and capabilities that it is made of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_sglang.config import SGLangConfig
from areal_vllm.adapter import VLLMAdapter

if TYPE_CHECKING:
    from types import ModuleType

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
pytestmark = pytest.mark.slow


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the page."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    import engines_page

    assert Path(engines_page.__file__).parent == REFERENCE, sys.path
    return engines_page


@pytest.fixture
def rows(page: ModuleType) -> dict[str, Any]:
    """The rows by their titles."""
    return {row.title: row for rows in page.ROWS.values() for row in rows}


def test_a_cell_names_only_settings_that_are_needed(page: ModuleType, rows: dict[str, Any]) -> None:
    for row in rows.values():
        for engine, needs in row.needs.items():
            if page.cell(row, engine) not in ("yes", "no"):
                fewer = [[need for need in needs if need != left_out] for left_out in needs]
                assert not any(page.accepts(row, engine, some) for some in fewer), (row.title, engine)


def test_a_cell_follows_the_checks_and_the_capabilities(
    page: ModuleType, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ipc, images = rows["`ipc`, servers take turns with the trainer"], rows["images"]
    assert [page.cell(ipc, engine) for engine in page.ENGINES] == ["no", "no", "`memory_saver: true`"]
    assert [page.cell(images, engine) for engine in page.ENGINES] == ["yes", "yes", "yes"]
    monkeypatch.setattr(SGLangConfig, "reads_tensors", False)
    assert page.cell(ipc, "sglang") == "no"
    capabilities = VLLMAdapter.capabilities
    monkeypatch.setattr(VLLMAdapter, "capabilities", lambda self: replace(capabilities(self), images=False))
    assert page.cell(images, "vllm") == "no"


def test_a_row_that_no_engine_knows_is_no_everywhere(page: ModuleType) -> None:
    row = page.Row("nothing", ["inference_engine.made_up=1"])
    assert {page.cell(row, engine) for engine in page.ENGINES} == {"no"}
