"""Arrows between rooms and between files: what may import what, and that no files of a room form a circle.

An import counts wherever it stands: at the top of a file, inside of a function, or under `TYPE_CHECKING`, for that too
says who must know whom.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ROOT = Path(__file__).parents[2]
CORE = ROOT / "areal_core"
PLUGINS = sorted(path for path in (ROOT / "plugins").glob("areal_*") if path.is_dir())

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "exports": set(),
    "background": {"errors"},
    "diagnostics": {"errors", "config", "disk"},
    "disk": {"errors"},
    "files": set(),
    "gpus": {"errors"},
    "metric_names": {"errors"},
    "proxies": set(),
    "waiting": set(),
    "plugins": {"errors", "metric_names"},
    "config": {"errors", "files", "gpus", "plugins", "interfaces", "proxies"},
    "cli": {"errors", "files", "plugins", "config", "diagnostics", "runtime", "proxies", "runs", "checks", "driver",
            "models"},
    "data": {"errors"},
    "interfaces": {"data", "errors", "exports"},
    "models": {"errors", "exports", "disk", "config", "data", "interfaces", "plugins"},
    "runtime": {"errors", "background", "config", "diagnostics", "disk", "gpus", "interfaces", "proxies", "waiting"},
    "messages": {"interfaces", "runtime"},
    "algorithms": {"config", "data", "errors", "interfaces"},
    "chat": {"config", "exports", "interfaces"},
    "workflows": {"chat", "config", "data", "interfaces"},
    "rewards": {"errors", "exports", "files", "background", "interfaces", "messages", "runtime", "config"},
    "ledger": {"errors", "background", "disk", "data", "interfaces"},
    "rollout": {"errors", "background", "disk", "config", "data", "interfaces", "messages", "metric_names", "ledger",
                "rewards", "runtime"},
    "training": {"errors", "background", "disk", "config", "data", "interfaces", "messages", "ledger", "runtime"},
    "inference": {"errors", "background", "disk", "config", "plugins", "data", "gpus", "interfaces", "messages",
                  "runtime", "models", "proxies", "waiting"},
    "runs": {"errors", "background", "chat", "diagnostics", "disk", "config", "files", "plugins", "data", "inference",
             "interfaces", "messages", "metric_names", "models", "runtime", "ledger", "rewards", "rollout", "training"},
    "checks": {"errors", "background", "disk", "config", "files", "plugins", "data", "interfaces", "models", "rewards",
               "runtime", "training", "runs", "waiting"},
    "driver": {"errors", "checks", "diagnostics", "disk", "config", "files", "gpus", "plugins", "data", "inference",
               "interfaces", "messages", "runtime", "ledger", "proxies", "training", "runs", "waiting"},
    "debugging": {"errors", "cli", "config", "data", "driver", "interfaces", "messages", "rewards", "rollout", "runs",
                  "runtime", "training"},
    "library": {"errors", "background", "cli", "config", "data", "disk", "files", "ledger", "plugins", "runtime"},
    "trl": {"errors", "config", "files", "library", "runtime"},
    "testing": {"exports", "plugins"},
    # Public modules: the names of other rooms.
    "sdk": {"exports", "algorithms", "interfaces", "workflows"},
    "engines": {"exports", "interfaces", "training"},
    "servers": {"exports", "inference", "interfaces", "runs"},
    "launchers": {"exports", "interfaces", "runtime"},
    "processes": {"exports", "background", "gpus", "proxies", "runtime", "waiting"},
    "programs": {"exports", "checks", "cli", "debugging", "diagnostics", "driver", "rewards", "rollout", "runs",
                 "runtime"},
}  # fmt: skip
"""For each room of the core the rooms that it knows; of a public module those that its stub names."""

SETTINGS_OF_WHAT_THEY_MAKE = {"areal_deepspeed.document", "areal_hf.server"}
"""Files that name settings for type checkers alone, and whose classes these settings make when the core calls them."""


def arrows_of(modules: Mapping[str, Path], *, for_types: bool) -> dict[str, set[str]]:
    """For each of some modules those of them that it imports, and whose packages run with them.

    Args:
        modules: files by their dotted names.
        for_types: whether an import under `TYPE_CHECKING` is one.
    """
    arrows = {}
    for module, path in modules.items():
        names = file_imports(parsed(path), modules, for_types=for_types and module not in SETTINGS_OF_WHAT_THEY_MAKE)
        packages = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)}
        own = {package for package in packages if f"{module}.".startswith(f"{package}.")}
        arrows[module] = (names | (packages - own) & set(modules)) - {module}
    return arrows


def circle_in(arrows: Mapping[str, set[str]]) -> str:
    """A circle of modules in words; empty where there is none."""
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as circle:
        return " -> ".join(circle.args[1])
    return ""


def file_imports(tree: ast.AST, modules: Collection[str], *, for_types: bool) -> set[str]:
    """Which of some modules a file imports, wherever in it; those for type checkers where they are asked for."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            taken = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= taken if taken <= set(modules) else {*taken, str(node.module)}  # a package for its files' sake
        names |= file_imports(node, modules, for_types=for_types)
    return names & set(modules)


def all_imports(tree: ast.AST) -> set[str]:
    """Modules that a file imports, for type checkers too, without the names that it takes from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


def module_files(folder: Path, base: Path) -> dict[str, Path]:
    """Modules below a folder by their dotted names."""
    return {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }


def room(module: str) -> str:
    return ([*module.split("."), ""])[1]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_knows_only_the_rooms_below_it(name: str) -> None:
    modules = {m: p for m, p in module_files(CORE, ROOT).items() if room(m) == name}
    assert modules, f"there is no room {name}"
    wrong = []
    for module, path in modules.items():
        stub = path.with_suffix(".pyi")
        for imported in all_imports(parsed(path)) | (all_imports(parsed(stub)) if stub.is_file() else set()):
            known = room(imported)
            if imported.startswith("areal_core.") and known != name and known not in ROOMS[name]:
                wrong.append(f"{module} -> {imported}")
    assert sorted(wrong) == []


def test_every_room_is_on_the_plan() -> None:
    rooms = {room(module) for module in module_files(CORE, ROOT)} - {"", "__main__"}
    assert rooms == set(ROOMS)


def test_rooms_form_no_circle() -> None:
    assert circle_in(ROOMS) == ""


@pytest.mark.parametrize("folder", [CORE, *(plugin / "src" for plugin in PLUGINS)], ids=lambda f: f.parent.name)
def test_files_form_no_circle(folder: Path) -> None:
    """Neither of what runs, without exception, nor of all imports together."""
    modules = module_files(folder, ROOT if folder == CORE else folder)
    assert circle_in(arrows_of(modules, for_types=False)) == ""
    assert circle_in(arrows_of(modules, for_types=True)) == ""


@pytest.mark.parametrize(
    "place", ["", "if TYPE_CHECKING:\n    ", "def work():\n    ", "class A:\n    def work(self):\n        "]
)
def test_a_circle_is_found_wherever_the_import_stands(place: str, tmp_path: Path) -> None:
    files = {"one": f"{place}from here import two\n", "two": f"{place}import here.one\n", "__init__": ""}
    for name, text in files.items():
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / f"{name}.py").write_text(text)
    modules = module_files(tmp_path / "here", tmp_path)
    assert "here.one" in circle_in(arrows_of(modules, for_types=True))
    assert bool(circle_in(arrows_of(modules, for_types=False))) == ("TYPE_CHECKING" not in place)


def test_only_one_place_starts_background_work() -> None:
    """Tasks and threads, in the core and in plugins."""
    starters = {"create_task", "ensure_future", "Thread", "run_coroutine_threadsafe"}
    found = []
    for path in [*CORE.rglob("*.py"), *(p for plugin in PLUGINS for p in (plugin / "src").rglob("*.py"))]:
        if path == CORE / "background.py" or "worker" in path.parts:  # a worker runs inside of vLLM
            continue
        for node in ast.walk(parsed(path)):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if isinstance(node, ast.Attribute | ast.Name) and name in starters:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    # Of something that is awaited a few lines further down; or whose result is in the hands of who started it.
    allowed = {"ensure_future", "run_coroutine_threadsafe"}
    assert [place for place in found if place.rsplit(" ", 1)[1] not in allowed] == []
