"""The pages of docs/reference are what the code says, and have every public name, hook, key and command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from areal_core import servers
from areal_core.cli.commands.run import SAFE_ON_RESUME
from areal_core.exports import PUBLIC_MODULES
from areal_core.plugins import PluginManager
from areal_core.plugins.hooks import areal_run_finished
from areal_core.plugins.records import KINDS
from areal_testing import PUBLIC_MODULES as PUBLIC_MODULES_OF_TESTS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
NAMES = (
    "algorithms",
    "api",
    "coming_from",
    "commands",
    "components",
    "config",
    "engines",
    "hooks",
    "interfaces",
    "metrics",
    "other_implementations",
    "versions",
)


def page(name: str) -> str:
    """The text of a page."""
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages as they are made now."""
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, str(REFERENCE / "write_pages.py"), str(folder)], check=True, cwd=ROOT)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_current(name: str, made: Path) -> None:
    assert sorted(path.stem for path in made.iterdir()) == sorted(NAMES)
    current = (made / f"{name}.md").read_text(encoding="utf-8")
    assert page(name) == current, "write it anew: python docs/reference/write_pages.py"


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, *PUBLIC_MODULES_OF_TESTS])
def test_every_public_name_is_there_and_described(module: str) -> None:
    has_interfaces = module in ("areal_core.sdk", "areal_core.engines", "areal_core.servers", "areal_core.launchers")
    text = page("interfaces" if has_interfaces else "api")
    section = text.partition(f" `{module}`\n\n")[2].partition("\n## ")[0]
    parts = {part.partition("`\n")[0]: part.partition("`\n")[2] for part in section.split("### `")}
    names = import_module(module).__all__
    assert [name for name in names if name not in parts] == []
    undescribed = [
        name for name in names if not re.sub(r"```.*?```|\*\*.*?\*\*", "", parts[name], flags=re.DOTALL).strip()
    ]
    assert undescribed == []
    assert f"| `{module}` | {len(names)} |" in page("api")


def test_every_kind_has_its_hook_and_its_protocol() -> None:
    rows = re.findall(r"^\| `areal_(\w+)\(\)` \| `\w+` \| .*\[`\w+`\]\((\w+)\.md#(\w+)\)", page("hooks"), re.MULTILINE)
    assert [kind for kind, _, _ in rows] == list(KINDS)
    for _, where, anchor in rows:
        assert anchor in [name.lower() for name in re.findall(r"^### `(\w+)`", page(where), re.MULTILINE)]
    assert f"### `{areal_run_finished.__name__}(hook, run_dir, outcome, signal)`" in page("hooks")


def test_every_command_is_there() -> None:
    from areal_core.cli import command_names

    names = sorted(path.parent.name.removeprefix("areal_") for path in ROOT.glob("plugins/areal_*/src/*/plugin.py"))
    records = [record for kind, record in PluginManager.load(names).records() if kind == "commands"]
    several = [*command_names(), *(record.name for record in records)]
    own = [one.name if several.count(one.name) == 1 else f"{one.plugin} {one.name}" for one in records]
    expected = [*command_names(), *own]
    assert re.findall(r"^## areal (.+)$", page("commands"), re.MULTILINE) == expected


def test_what_may_change_on_a_resume_is_there() -> None:
    assert [key for key in SAFE_ON_RESUME if f"`{key}`" not in page("config")] == []


def test_every_setting_of_a_component_is_described() -> None:
    assert "### `fsdp/fsdp`" in page("components")
    assert [line for line in page("components").splitlines() if line.endswith("|  |")] == []


def test_every_link_of_the_algorithms_leads_to_a_heading() -> None:
    text = page("algorithms")
    found = re.findall(r"^### `(.+?)` (.+)$", text, re.MULTILINE)
    headings = {f"{name}-{kind}".replace("/", "").replace(" ", "-") for name, kind in found}
    assert len(headings) == len(found)
    assert set(re.findall(r"\(#(.+?)\)", text.partition("\n## ")[0])) == headings


def test_what_the_constructor_of_an_engine_is_given_is_what_the_run_gives() -> None:
    tree = ast.parse((ROOT / "areal_core" / "runs" / "engines.py").read_text())
    (given,) = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("inference_engine.build")
    ]
    documentation = servers.InferenceEngine.__doc__ or ""
    assert [name for name in sorted(filter(None, given)) if f"`{name}`" not in documentation] == []


@pytest.mark.parametrize("name", ["api", "interfaces"])
def test_an_example_is_code_also_behind_the_arguments(name: str) -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)
    assert page(name).count("\n>>> ") == sum(f"\n{block}".count("\n>>> ") for block in blocks)
    assert "- >>> " not in page(name)
    assert "Example:" not in page(name)


@pytest.mark.parametrize("name", ["api", "interfaces"])
def test_a_signature_shows_its_defaults(name: str) -> None:
    assert re.findall(r"^\*\*`.* = [,)].*", page(name), re.MULTILINE) == []
    if name == "api":
        assert "**`public_environment(text: str = '') -> dict[str, str]`**" in page(name)
