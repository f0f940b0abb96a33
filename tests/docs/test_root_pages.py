"""CONTRIBUTING, SECURITY and CITATION: what they name is there, and they stay short."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import areal_core

ROOT = Path(__file__).parents[2]
LIMITS = {"CONTRIBUTING.md": 900, "SECURITY.md": 350, "tests/outside_plugin/README.md": 250}
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in LIMITS}
CONTRIBUTING = TEXTS["CONTRIBUTING.md"]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_is_short_and_its_links_lead_somewhere(name: str) -> None:
    assert len(TEXTS[name].split()) <= LIMITS[name]
    for target, anchor in re.findall(r"\]\(([^)#\s]+)(?:#([^)]*))?\)", TEXTS[name]):
        page = (ROOT / name).parent / target
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_the_make_targets_that_are_named_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./%-]+):", makefile, re.MULTILINE))
    lines = re.findall(r"(?:`|^)make ([^`\n]+)", CONTRIBUTING, re.MULTILINE)
    named = {word for line in lines for word in shlex.split(line)}
    assert {".venv/test", "test-fast", "lint", "docs"} <= named
    assert named - targets == set()


def test_paths_that_are_named_are_there() -> None:
    commands = re.findall(r"^\.venv/bin/python -m pytest (\S+)$", CONTRIBUTING, re.MULTILINE)
    paths = re.findall(r"`((?:areal_core|docs|plugins|tests)/[\w./]*)`", CONTRIBUTING)
    assert commands
    assert len(paths) > 4
    assert [path for path in (*commands, *paths) if not (ROOT / path).exists()] == []


def test_the_diagram_names_packages_of_the_core() -> None:
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", CONTRIBUTING, re.DOTALL)
    boxes = dict(re.findall(r'^    (\w+)\[\(?"[^"]*<br>([^"]+)"', diagram, re.MULTILINE))
    packages = {package for box in boxes.values() for package in box.split(", ")}
    assert [package for package in packages if not (ROOT / "areal_core" / package).is_dir()] == []
    edges = [line.strip() for line in diagram.splitlines() if "->" in line]
    ends = {word for edge in edges for word in re.findall(r"\w+", re.sub(r'"[^"]*"', "", edge))}
    assert ends == set(boxes)


def test_what_is_public_is_there() -> None:
    (section,) = re.findall(r"^## What is public\n(.*?)^## ", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    exporting, whole = section.split(";")[:2]
    for name in re.findall(r"`((?:areal_core)?\.[\w.]+)`", exporting):
        assert import_module(f"areal_core.{name.removeprefix('areal_core').lstrip('.')}").__all__
    for name in re.findall(r"`(areal_core[\w.]+)`", whole):
        import_module(name)


def test_the_limits_are_those_of_the_tests() -> None:
    limits = ast.parse((ROOT / "tests" / "architecture" / "test_sizes.py").read_text(encoding="utf-8")).body
    (values,) = [node.value for node in limits if isinstance(node, ast.Assign) and "MAXIMUM_LINE" in ast.dump(node)]
    file, function, line = ast.literal_eval(values)
    assert f"{function} lines of code, a file {file}, a line {line} characters" in CONTRIBUTING


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == areal_core.__version__
