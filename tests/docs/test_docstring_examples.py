"""The examples in docstrings print what they show."""

from __future__ import annotations

import doctest
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from areal_core.files import KeptSources
from tests.docstring_examples import examples_in

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
    module = import_module(name)
    before = state_of_this_process()
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert state_of_this_process() == before, "the next tests of this process would see it"
    assert module.__file__ is not None
    written = examples_in(Path(module.__file__).read_text(encoding="utf-8"))
    assert result.attempted == len(written), "doctest skips some, such as those of a @contextmanager"


def state_of_this_process() -> tuple[object, ...]:
    """What an example must leave as it was."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AREAL_")}  # libraries set others
    return Path.cwd(), KeptSources.folder, sys.path[:], variables
