"""Links of the pages lead somewhere, the index names every page, and the words of the glossary are in use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "plugins").glob("*/README.md")])
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def definitions(path: Path) -> set[str]:
    """Names of the functions, classes and methods of a file; methods also as `Class.method`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body
                      if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_stop_of_the_prompt_is_a_function_that_is_there() -> None:
    page = ROOT / "docs" / "follow-one-prompt.md"
    stops = [(m["text"], m["target"]) for m in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert len(stops) > 30
    lost = [
        f"{text} in {target}"
        for text, target in stops
        if target.endswith(".py") and text.strip("`") not in definitions((page.parent / target).resolve())
    ]
    assert lost == []


def test_the_readme_leads_to_the_index_and_the_index_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/README.md)" in readme
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    inside = {"README.md", "config_introduction.md"}
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in inside]
    assert [name for name in pages if f"]({name})" not in index] == []


def test_the_readme_is_short_and_names_every_distribution() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 600
    names = [folder.name.replace("_", "-") for folder in (ROOT / "plugins").iterdir() if folder.is_dir()]
    assert [name for name in ["areal-core", *names] if f"`{name}` |" not in readme] == []


def test_the_words_of_the_glossary_are_in_the_code() -> None:
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "areal_core").rglob("*.py")).lower()
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [w for line in re.findall(r"^\| (.+?) \|", page, re.M)[2:] for w in re.sub(r"\(.*?\)", "", line).split(",")]
    assert len(words) >= 40
    assert [word.strip() for word in words if word.strip().lower() not in code] == []
