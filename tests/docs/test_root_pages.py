"""What CONTRIBUTING, SECURITY and CITATION name exists."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import areal_core

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "tests/outside_plugin/README.md")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
CONTRIBUTING = TEXTS["CONTRIBUTING.md"]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]+)(?:#([^)]*))?\)", TEXTS[name]):
        page = (ROOT / name).parent / target
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_the_make_targets_that_are_named_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./%-]+):", makefile, re.MULTILINE))
    lines = re.findall(r"(?:`|^)make ([^`\n]+)", CONTRIBUTING, re.MULTILINE)
    named = {word for line in lines for word in shlex.split(line)}
    assert {"test", "test-all", "test-nightly", "docs"} <= named
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


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == areal_core.__version__
