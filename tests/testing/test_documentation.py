"""The pages about plugins show the files of examples/plugin as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_core.testing import conformance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^`(examples/plugin/\S+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "text"), SHOWN, ids=lambda value: value[:60].split("/")[-1].split("\n")[0])
def test_a_block_is_the_file_that_it_names(path, text):
    assert text == (ROOT / path).read_text(encoding="utf-8"), f"docs/writing-a-plugin.md shows an older {path}"


def test_every_module_of_the_example_is_shown():
    modules = {f"examples/plugin/src/areal_example/{name}.py" for name in ("rewards", "workflows", "algorithms")}
    modules |= {f"examples/plugin/src/areal_example/{name}.py" for name in ("config", "plugin")}
    assert (
        modules | {"examples/plugin/pyproject.toml", "examples/plugin/tests/test_conformance.py"} == dict(SHOWN).keys()
    )


def test_the_page_on_conformance_names_every_suite():
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    suites = [name for name in conformance.__all__ if name.endswith("Suite")]
    assert [name for name in suites if f"`{name}`" not in page] == []
    assert set(re.findall(r"`(\w+Suite)`", page)) <= set(suites)
