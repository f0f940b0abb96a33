"""A plugin that somebody wrote against an earlier core, with this one: see tests/outside_plugin/README.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OUTSIDE = ROOT / "tests" / "outside_plugin" / "areal-outside"
FROZEN_AT = "707887e9"
CONFIGS = ("run.yaml", "outside/small")
REMEDY = (
    'Keep what it uses, or say under "Breaking" in CHANGELOG.md what its author has to change and freeze it anew:\n'
    "tests/outside_plugin/README.md"
)
NAMES = """
import ast, importlib, sys
from pathlib import Path
from areal_core.plugins import hooks

def is_there(module, name):
    try:
        return hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False

for path in sorted(Path().glob("*/**/*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        place = f"({path}:{getattr(node, 'lineno', 0)})"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("areal_core"):
            for alias in node.names:
                if not is_there(node.module, alias.name):
                    print(f"{node.module} has no {alias.name} {place}")
        if isinstance(node, ast.FunctionDef) and "hookimpl" in map(ast.unparse, node.decorator_list):
            if not hasattr(hooks, node.name):
                print(f"there is no hook {node.name} {place}")
"""
"""Says which names the files of the current folder import from areal and which hooks they have that are not there;
of imports for type checkers, too, no test would tell."""


class Outside:
    """The plugin, installed; `broken` says what of it does not work with some core."""

    def __init__(self, folder: Path) -> None:
        self._site, self._project = folder / "site", folder / "areal-outside"
        shutil.copytree(OUTSIDE, self._project)
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
        line = [sys.executable, "-m", "pip", "install", *options, "--target", str(self._site), str(self._project)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(self._project / "build", ignore_errors=True)

    def broken(self, core: Path) -> list[str]:
        """One line for each thing; none where everything works. `core` is the folder that `areal_core` lies in."""
        return [*self.gone(core), *self._refused(core), *self._failed(core)]

    def gone(self, core: Path) -> list[str]:
        """Names and hooks that it uses and that are not there, each with the place."""
        done = self._python(core, "-c", NAMES)
        return done.stdout.splitlines() + (done.stderr.splitlines()[-1:] if done.returncode else [])

    def _refused(self, core: Path) -> list[str]:
        """Its configs that are not valid, and why."""
        checked = {config: self._python(core, "-m", "areal_core", "config", "check", config) for config in CONFIGS}
        return [f"areal config check {key}: {each.stderr.strip()}" for key, each in checked.items() if each.returncode]

    def _failed(self, core: Path) -> list[str]:
        """Tests of the plugin that fail; those that fail for the same reason in one line."""
        report = self._project / "report.xml"
        report.unlink(missing_ok=True)
        options = ("-p", "no:cacheprovider", "--continue-on-collection-errors", "--timeout=600", f"--junitxml={report}")
        done = self._python(core, "-m", "pytest", *options)
        tests: dict[str, list[str]] = {}
        for name, reason in _failures(report) if report.is_file() else ():
            tests.setdefault(reason, []).append(name)
        if done.returncode and not tests:
            return [f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}"]
        return [f"{reason} ({names[0]}{_more(names)})" for reason, names in tests.items()]

    def _python(self, core: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python where the plugin's files are, with this core before the one that is installed."""
        path = os.pathsep.join([str(self._site), str(core), *filter(None, sys.path)])
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("AREAL_", "PYTEST_"))}
        variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self._project, env=variables, capture_output=True, text=True, check=False, timeout=1500,
        )  # fmt: skip


def _failures(report: Path) -> Iterator[tuple[str, str]]:
    """Name and reason of each test that failed, and of each file that could not be imported."""
    for case in ElementTree.parse(report).iter("testcase"):
        for found in (*case.findall("failure"), *case.findall("error")):
            name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
            said = re.findall(r"^E +([\w.]*(?:Error|Exception)\b.*)", found.text or "", re.MULTILINE)
            reason = said[-1] if said else (found.get("message") or "no reason is given").splitlines()[0]
            yield name.replace("tests.", "", 1), re.sub(r" \(/\S+\)$", "", reason)[:300]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """Installed once."""
    return Outside(tmp_path_factory.mktemp("outside"))


def test_a_plugin_of_somebody_else_still_works(outside: Outside) -> None:
    if broken := outside.broken(ROOT):
        listed = "\n".join(f"- {line}" for line in broken)
        pytest.fail(f"areal-outside, frozen at {FROZEN_AT}, breaks with this core:\n{listed}\n{REMEDY}", pytrace=False)


@pytest.mark.nightly
def test_a_break_is_told_by_its_name(outside: Outside, tmp_path: Path) -> None:
    names = ("group_mean", "WorkflowContext", "max_staleness", "from_generation")
    broken = outside.broken(core_without(names, tmp_path))
    for words in (
        "areal_core.data has no group_mean (src/areal_outside/advantages.py:8)",
        "areal_core.interfaces has no WorkflowContext (src/areal_outside/workflows.py:12)",
        "rollout.max_staleness: unknown key",
        "has no attribute 'from_generation' (test_conformance.TestCompletion.",
    ):
        assert any(words in line for line in broken), f"{words} is not in\n" + "\n".join(broken)
    assert len("\n".join(broken).splitlines()) < 30


def test_a_hook_that_is_gone_is_told_by_its_name(outside: Outside, tmp_path: Path) -> None:
    (gone,) = outside.gone(core_without(("areal_step_finished",), tmp_path))
    assert gone.startswith("there is no hook areal_step_finished (src/areal_outside/plugin.py:")


def core_without(names: Collection[str], folder: Path) -> Path:
    """A copy of the core in which these names are others, wherever they stand."""
    shutil.copytree(ROOT / "areal_core", folder / "areal_core", ignore=shutil.ignore_patterns("__pycache__"))
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in folder.rglob("*.py"):
        path.write_text(pattern.sub(r"new_\1", path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder
