"""Arrows: what may import what, on the syntax tree, imports inside functions included; and what leaves torch out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.plugins import catalog

ROOT = Path(__file__).parents[2]
CORE = ROOT / "areal_core"
PLUGINS = sorted(path for path in (ROOT / "plugins").glob("areal_*") if path.is_dir())
TORCH_FREE = (
    "plugins",
    "config",
    "cli",
    "rollout",
    "inference",
    "rewards",
    "workflows",
    "messages",
    "checks",
    "driver",
    "runtime",
    "models",
)
WITH_TORCH = {"areal_core.checks.algorithm_trial", "areal_core.models.dequantize", "areal_core.models.shown_masks"}
"""Modules of these rooms that make tensors, and are imported by code that does too."""
FIRST_PARTY = {path.name.removeprefix("areal_") for path in PLUGINS} | {"deepspeed", "ray", "slurm"}
NAMES_PLUGINS = {"plugins/catalog.py", "config/schema.py", "trl/mapping.py", "trl/trainer.py", "trl/arguments.py"}
"""The table of repair hints, a schema's keys, and the translation of another program's words into components."""
LIBRARIES = {"areal_agents", "areal_fsdp", "areal_vision"}
"""Libraries, whether plugins as well or not: others may import them, and declare it like any dependency."""
TESTING = "areal_testing"
"""The distribution that tests import, and nothing that a run executes."""
BROKEN_BY_TESTS = {"areal_fsdp", "areal_grpo"}
"""Plugins whose components the tests of areal_testing break, to try the suites."""


SECTIONS = {"rewards", "trackers", "servers", "view", "evaluation", "agents", "environments", "sandboxes", "models"}
SECTIONS |= {"convert"}
"""Words that are a plugin's name and also a section of every config, a kind of component, or a method of an image."""


def modules(folder: Path, base: Path) -> dict[str, Path]:
    """The importable modules below a folder by their dotted names."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def names(path: Path, package: str) -> list[str]:
    """The imports of a file that lie in a package."""
    return sorted(name for name in imports(path) if name == package or name.startswith(f"{package}."))


def test_the_core_imports_no_plugin():
    found = {
        str(path.relative_to(ROOT)): sorted(name for name in imports(path) if name.startswith("areal_"))
        for path in CORE.rglob("*.py")
    }
    assert {path: [n for n in ns if n.split(".")[0] != "areal_core"] for path, ns in found.items()} == {
        path: [] for path in found
    }


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_imports_the_core_and_no_other_plugin_but_declared_libraries(plugin):
    declared = (plugin / "pyproject.toml").read_text(encoding="utf-8")
    libraries = {name for name in LIBRARIES if f'"{name.replace("_", "-")}>=' in declared}
    for path in plugin.rglob("*.py"):
        for name in imports(path):
            package = name.split(".")[0]
            allowed = {"areal_core", plugin.name, *libraries}
            if path.is_relative_to(plugin / "tests"):
                allowed |= {TESTING, *(BROKEN_BY_TESTS if plugin.name == TESTING else ())}
            assert not package.startswith("areal_") or package in allowed, f"{path}: {name}"


def test_nothing_that_a_run_executes_imports_what_tests_import():
    """The core's forward names `areal_testing` in texts, and imports it when a test uses an old name."""
    sources = [CORE, *(plugin / "src" for plugin in PLUGINS if plugin.name != TESTING), *ROOT.glob("examples/*/src")]
    found = {str(path): [*names(path, TESTING), *names(path, "pytest")] for at in sources for path in at.rglob("*.py")}
    assert {path: imported for path, imported in found.items() if imported} == {}


def test_rollout_and_training_meet_only_in_interfaces_and_data():
    for folder, other in (("rollout", "training"), ("training", "rollout")):
        for path in (CORE / folder).rglob("*.py"):
            assert names(path, f"areal_core.{other}") == [], path
    for folder in ("interfaces", "data"):
        for path in (CORE / folder).rglob("*.py"):
            assert names(path, "areal_core.rollout") + names(path, "areal_core.training") == [], path


def test_plugins_and_config_stand_below_everything_else():
    """But for `interfaces`, whose roles and passes settings name; it imports no torch."""
    above = ("rollout", "training", "run", "cli", "testing", "data")
    for folder, more in (("plugins", ("interfaces",)), ("config", ())):
        for path in (CORE / folder).rglob("*.py"):
            for package in (*above, *more):
                assert names(path, f"areal_core.{package}") == [], f"{path} imports {package}"


def test_nothing_imports_the_tests_or_the_examples():
    for path in [*CORE.rglob("*.py"), *(found for plugin in PLUGINS for found in (plugin / "src").rglob("*.py"))]:
        assert not {name.split(".")[0] for name in imports(path)} & {"tests", "plugins", "examples"}, path


def test_only_the_room_of_plugins_touches_the_hooks_of_pluggy():
    touching = [
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr == "hook" for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert sorted(touching) == [
        "plugins/events.py", "plugins/manager.py", "plugins/registered.py", "plugins/registration.py",
    ]  # fmt: skip


def test_no_first_party_plugin_is_named_in_the_core_but_in_the_repair_table():
    """Texts for readers may name examples; the strings that code compares or looks up may not."""
    found = []
    for path in sorted(CORE.rglob("*.py")):
        if path.relative_to(CORE).as_posix() in NAMES_PLUGINS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.removeprefix("areal-").partition("/")[0]
                if name in FIRST_PARTY - SECTIONS:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.value}")
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", TORCH_FREE)
def test_every_module_is_imported_without_torch(folder):
    for name in modules(CORE / folder, ROOT):
        if not name.endswith("__main__") and name not in WITH_TORCH:
            _import_without_torch(name, ROOT)


@pytest.mark.parametrize("plugin", [p for p in PLUGINS if p.name != TESTING], ids=lambda plugin: plugin.name)
def test_the_records_and_settings_of_a_plugin_are_imported_without_torch(plugin):
    source = plugin / "src"
    for name, path in modules(source, source).items():
        if path.name in {"plugin.py", "config.py", "__init__.py"}:
            _import_without_torch(name, source)


def test_record_modules_import_only_the_plugin_api():
    for plugin in PLUGINS:
        for path in (plugin / "src").glob("*/plugin.py"):
            allowed = {"areal_core", "__future__", "typing", "collections", "pathlib", plugin.name}
            assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def _import_without_torch(name: str, base: Path) -> None:
    sources = [plugin / "src" for plugin in PLUGINS]  # of libraries that it declares
    code = f"import sys, {name}\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(map(str, [base, ROOT, *sources])), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr.strip().splitlines()[-1]}"


def test_what_a_missing_plugin_of_this_project_is_called_is_known() -> None:
    """Of these the error says `pip install areal-NAME`; of any other that it is somebody else's."""
    own = {path.name.removeprefix("areal_") for path in PLUGINS if (path / "src" / path.name / "plugin.py").is_file()}
    assert own <= set(catalog.FIRST_PARTY)


def test_the_tests_for_further_pythons_are_collected_without_torch():
    """`make test-pythons` runs them in environments that have neither torch nor transformers."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = next(line.partition(":=")[2].split() for line in makefile.splitlines() if line.startswith("TORCH_FREE"))
    script = (
        "import sys, pytest\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, "--collect-only", "-q", "-p", "no:cacheprovider", *listed],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:]


def test_every_function_inside_a_test_is_used():
    """A test whose `async def check()` never runs passes whatever the code does."""
    unused = []
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]:
        for test in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) or not test.name.startswith("test_"):
                continue
            used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
            inner = [node for node in test.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            unused += [f"{path.relative_to(ROOT)}: {test.name}" for node in inner if node.name not in used]
    assert unused == []
