"""The examples in docstrings print what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [(ROOT, "areal_core"), *((folder, ".") for folder in sorted(ROOT.glob("plugins/*/src")))]
MODULES = sorted(
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
    for base, package in SOURCES
    for path in (base / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
LIBRARIES = {"areal_core.data.tables": "datasets"}
"""Libraries that the examples of a module need and `make test` does not install."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    result = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
