"""Links lead somewhere, every page is in a table of contents, and the site can be built."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLUGIN_PAGES = sorted((ROOT / "plugins").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *PLUGIN_PAGES]
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
    page = DOCS / "concepts" / "follow-one-prompt.md"
    stops = [(m["text"], m["target"]) for m in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert len(stops) > 30
    lost = [
        f"{text} in {target}"
        for text, target in stops
        if target.endswith(".py") and text.strip("`") not in definitions((page.parent / target).resolve())
    ]
    assert lost == []


def test_every_page_is_in_a_table_of_contents_and_linked_from_the_first_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = sorted(str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if page.stem != "index")
    listed = [line for tree in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in tree.splitlines()]
    assert sorted(line for line in listed if line and not line.startswith(":")) == pages
    assert [page for page in pages if f"]({page}.md)" not in index] == []
    assert "](docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_names_every_distribution() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [folder.name.replace("_", "-") for folder in (ROOT / "plugins").iterdir() if folder.is_dir()]
    assert [name for name in ["areal-core", *names] if f"`{name}` |" not in readme] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors between pages among them; `make docs` does the same."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", "docs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
