"""First-party plugins and examples import public names only, as anybody's plugin must."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import areal_testing
from areal_core import exports
from tests.docstring_examples import examples_in

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FOLDERS = [*sorted(ROOT.glob("plugins/*/src")), ROOT / "examples"]
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/*/*.md") if path.parent.name != "reference")]
MAINTAINERS = {"from_stub"}
"""Names that pages show to maintainers of areal."""
PRIVATE = {
    "areal_core.driver.supervision.supervising",
    "areal_core.runtime.environment.member_place",
    "areal_core.runtime.supervisor.Supervisor",
}
"""Private names that first-party plugins may import. The list may only shrink.

The suite of launchers drives a launcher as a run does, and compares where a member was placed with where it was
started: it tests the protocol between the driver, launchers and members, which is the core's own. A suite for a kind
that a plugin adds needs none of them."""
PUBLIC_MODULES = (*exports.PUBLIC_MODULES, *areal_testing.PUBLIC_MODULES)
PACKAGES = {"areal_core", "areal_testing"}


def public_names(module: str) -> set[str]:
    """The public names of a module; none of a private module."""
    if module == "areal_core":
        return set(exports.stub_names(ROOT / "areal_core" / "__init__.pyi"))
    return set(import_module(module).__all__) if module in PUBLIC_MODULES else set()


def private_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each import of a private name of areal_core or areal_testing, wherever it stands.

    The files of a package may import all of it.
    """
    packages = PACKAGES - set(path.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] in packages]
            public = {"areal_core", *PUBLIC_MODULES}
            yield from ((node.lineno, module) for module in modules if module not in public)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in packages:
            public = public_names(node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if alias.name not in public and name not in PUBLIC_MODULES:
                    yield node.lineno, name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_it_imports_public_names_only(folder: Path) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(folder.rglob("*.py"))
        for line, name in private_imports(path)
        if name not in PRIVATE
    ]
    assert wrong == [], "use a public name, move the code, or make a name public: see CONTRIBUTING.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_docs_show_imports_public_names_only(page: Path) -> None:
    pattern = r"^ *from (areal_(?:core|testing)[\w.]*) import ([\w, ]+)$"
    lines = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)
    names = [(module, name.strip()) for module, some in lines for name in some.split(",")]
    wrong = [f"{module}.{name}" for module, name in names if name not in public_names(module) | MAINTAINERS]
    assert wrong == []


def test_every_allowed_private_name_is_still_imported() -> None:
    imported = {name for folder in FOLDERS for path in folder.rglob("*.py") for _, name in private_imports(path)}
    assert imported == PRIVATE


def names_in_examples() -> Iterator[str]:
    """Yield each name in examples that tests run: those of docstrings and pages, and the programs of `examples/`."""
    modules = [path.read_text(encoding="utf-8") for path in (ROOT / "areal_core").rglob("*.py")]
    sources = [example.source for text in modules for example in examples_in(text)]
    sources += [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.alias):
                yield node.name


def test_every_public_name_is_in_an_example() -> None:
    shown = set(names_in_examples())
    missing = {module: sorted(public_names(module) - shown) for module in exports.PUBLIC_MODULES}
    assert {module: names for module, names in missing.items() if names} == {}


@pytest.mark.parametrize("statement", ["import areal_core.rollout.tally", "from areal_core.disk import weight_files"])
@pytest.mark.parametrize("place", ["", "if TYPE_CHECKING:\n    ", "def work():\n    "])
def test_a_private_import_is_found_wherever_it_stands(statement: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(f"from areal_core import train\nfrom areal_core.sdk import Reward\n{place}{statement}\n")
    ((line, name),) = private_imports(file)
    assert line >= 3
    assert name.startswith(("areal_core.rollout", "areal_core.disk.weight_files"))


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_exists_and_belongs_to_one_public_module(module: str) -> None:
    names = import_module(module).__all__
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(import_module(module), name) is not None
