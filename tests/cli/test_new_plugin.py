"""`areal new-plugin`: each kind by itself, with nothing of another, and what is written works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from areal_core.cli import main
from areal_core.cli.new_plugin import KINDS, LONGEST
from areal_core.plugins import records as registry
from areal_core.plugins.catalog import Catalog

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin"
MARKED = {
    "reward": ("reward_functions", "rewards"),
    "dataset": ("datasets", "datasets"),
    "workflow": ("workflows", "workflows"),
    "environment": ("environments", "environments"),
    "agent": ("agents", "agents"),
    "tool": ("tools", "tools"),
    "sandbox": ("sandboxes", "sandboxes"),
    "reward_shaping": ("reward_shaping", "reward_shaping"),
    "group_filter": ("group_filters", "group_filters"),
    "model": ("models", "models"),
    "inference_engine": ("inference_engines", "inference_engines"),
    "launcher": ("launchers", "launchers"),
    "tracker": ("trackers", "trackers"),
}
"""Kinds that the template supplies by a mark: the mark, and the module."""
RECORDED = {
    "advantage": "advantages",
    "policy_loss": "policy_losses",
    "batch_transform": "batch_transforms",
    "correction": "corrections",
    "regularizer": "regularizers",
    "auxiliary_loss": "auxiliary_losses",
    "loss_aggregation": "loss_aggregations",
    "example_tokenizer": "example_tokenizers",
    "train_engine": "train_engines",
    "weight_transport": "weight_transports",
    "command": "commands",
    "health_check": "health_checks",
}
"""Kinds that it supplies by a record: the hook without `areal_`, and the module."""
MODULES = {**{kind: module for kind, (_, module) in MARKED.items()}, **RECORDED}
HOOKS = {
    **{kind: f'@register("{mark}")' for kind, (mark, _) in MARKED.items()},
    **{kind: f"areal_{name}" for kind, name in RECORDED.items()},
    "algorithm": "areal_algorithms",
    "preset": "areal_presets",
}
TESTED_ALONE = {
    "agent": "agents",
    "tool": "tools",
    "weight_transport": "weight_transports",
    "preset": "presets",
    "command": "commands",
    "health_check": "health_checks",
}
"""Kinds without a conformance suite: the module of their tests."""
SUITES = {
    kind: {"model": "ModelSourceSuite"}.get(kind, f"{''.join(map(str.capitalize, kind.split('_')))}Suite")
    for kind in KINDS
    if kind not in TESTED_ALONE
}
WITH_MODELS = {"advantage", "algorithm", "auxiliary_loss"}
"""Kinds whose settings are in config.py."""
FURTHER_FILES = {"inference_engine": {"toy_server.py"}, "preset": {"small_run.yaml"}}
FURTHER_TESTS = {"inference_engine": {"tests/test_toy_server.py"}}
BROUGHT = {"algorithm": {"advantage", "policy_loss", "algorithm"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, an empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(name: str, *kinds: str) -> dict[str, str]:
    """The files of a new plugin."""
    assert main(["new-plugin", name, *(word for kind in kinds for word in ("--kind", kind))]) == 0
    made = Path(f"areal-{name.replace('_', '-')}")
    return {str(path.relative_to(made)): path.read_text() for path in made.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_no_trace_of_another(kind: str) -> None:
    files = new("shortest", kind)
    chosen = BROUGHT.get(kind, {kind})
    text = "\n".join([*files, *files.values()])
    for other, component in KINDS.items():
        words = {component, HOOKS[other], SUITES.get(other, component)}
        found = {word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)}
        assert found == (words if other in chosen else set())
    assert not re.search(r"example\b", text)
    assert "areal_run_finished" not in text
    code = {"__init__.py", "plugin.py", "py.typed", *(f"{MODULES[one]}.py" for one in chosen & {*MODULES})}
    code |= {"config.py"} if chosen & WITH_MODELS else set()
    code |= FURTHER_FILES.get(kind, set())
    assert set(files) == {
        ".gitignore", "pyproject.toml", "README.md", "LICENSE", "run.yaml", "tests/test_conformance.py",
        ".github/workflows/ci.yml", ".github/workflows/release.yml", *(f"src/areal_shortest/{name}" for name in code),
        *(f"tests/test_{TESTED_ALONE[one]}.py" for one in chosen & {*TESTED_ALONE}),
        *FURTHER_TESTS.get(kind, ()),
    }  # fmt: skip


def test_every_kind_can_be_asked_for() -> None:
    names = {"reward_functions": "rewards"}
    assert len(KINDS) == len(registry.KINDS)
    assert {f"areal_{names.get(kind, kind)}" for kind in registry.KINDS} == {
        f"areal_{MARKED[kind][1]}" if kind in MARKED else HOOKS[kind] for kind in KINDS
    }


def test_without_a_kind_it_has_a_reward(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    files = new("shortest")
    said = capsys.readouterr().out
    assert [path for path in files if f"  areal-shortest/{path}\n" not in said] == []
    assert said.splitlines()[-3:] == [
        "  cd areal-shortest && pip install -e '.[run,test]'", "  python -m pytest", "  areal run run.yaml",
    ]  # fmt: skip
    assert "src/areal_shortest/rewards.py" in files
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"]["areal.plugins"] == {"shortest": "areal_shortest.plugin"}
    assert yaml.safe_load(files["run.yaml"])["rewards"] == [{"type": "shortest/brevity", "free_tokens": 3}]


def test_with_all_kinds_it_is_the_example_but_for_its_name_and_its_event_hook() -> None:
    for path, text in new("my_own", *KINDS).items():
        original = (TEMPLATE / path.replace("my_own", "example")).read_text()
        if not path.endswith("plugin.py") and path != "README.md":
            assert text.replace("my_own", "example").replace("my-own", "example") == original, path


@pytest.mark.parametrize("name", ["areal-my-own", "my-own", "my_own", "areal_my_own"])
def test_a_dash_is_read_as_an_underscore_and_the_name_of_the_distribution_will_do(name: str) -> None:
    assert main(["new-plugin", name]) == 0
    project = tomllib.loads(Path("areal-my-own/pyproject.toml").read_text())["project"]
    assert (project["name"], project["entry-points"]["areal.plugins"]) == (
        "areal-my-own", {"my_own": "areal_my_own.plugin"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Shortest", "no name of a plugin"),
        ("2nd", "no name of a plugin"),
        ("a/b", "no name of a plugin"),
        ("mine-", "no name of a plugin"),
        ("", "no name of a plugin"),
        ("a" * (LONGEST + 1), "no name of a plugin"),
        ("grpo", "areal's own"),
        ("testing", "areal's own"),
        ("areal-core", "areal's own"),
        ("there", "is installed"),
        ("taken", "areal-taken exists already"),
    ],
)
def test_a_name_that_is_refused(
    name: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Catalog, "names", lambda self: ["there"])
    (folder / "areal-taken").mkdir()
    assert main(["new-plugin", name]) == 2
    assert reason in capsys.readouterr().err
    assert [path.name for path in folder.rglob("*")] == ["areal-taken"]


def done(*words: str, at: Path, **environment: str) -> None:
    """Run a module of Python there and see that it is content."""
    line = [sys.executable, "-m", *words]
    variables = {**os.environ, **environment}
    result = subprocess.run(line, cwd=at, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "l" * LONGEST])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), tuple(KINDS)], ids="-".join)
def test_what_is_written_passes_ruff(name: str, kinds: tuple[str, ...], folder: Path) -> None:
    new(name, *kinds)
    for words in (("check",), ("format", "--check")):
        done("ruff", *words, "--no-cache", ".", at=folder / f"areal-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("reward",), tuple(KINDS), *(pytest.param((kind,), marks=pytest.mark.nightly) for kind in list(KINDS)[1:])],
    ids="-".join,
)
def test_what_is_written_installs_and_passes_its_tests(kinds: tuple[str, ...], folder: Path) -> None:
    new("shortest", *kinds)
    made = folder / "areal-shortest"
    pip = ("pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    done(*pip, "--no-build-isolation", "--target", str(folder / "site"), str(made), at=folder)
    path = os.pathsep.join([str(folder / "site"), *sys.path[1:]])
    done("areal_core", "config", "check", "run.yaml", at=made, PYTHONPATH=path)
    done("pytest", "-q", "-p", "no:cacheprovider", at=made, PYTHONPATH=path)


@pytest.mark.slow
def test_an_sdist_has_nothing_of_a_run_that_was_made_there(folder: Path) -> None:
    new("shortest", "reward")
    made = folder / "areal-shortest"
    for name in ("runs/first/attempts/1", "elsewhere/attempts/1"):
        (made / name).mkdir(parents=True)
        (made / name / "token").write_text("secret")
    done("hatchling", "build", "-t", "sdist", at=made)
    with tarfile.open(made / "dist" / "areal_shortest-0.1.0.tar.gz") as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    assert {name.split("/")[0] for name in names} == {
        "src", "tests", "run.yaml", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore",
    }  # fmt: skip


@pytest.mark.nightly
def test_what_is_written_passes_mypy(folder: Path) -> None:
    """All kinds in one folder, each in a plugin of its own: most of the time goes into what they import."""
    for kind in KINDS:
        new(f"one_{kind}", kind)
    sources = [str(path) for path in folder.glob("areal-*/src")]
    config = folder / "areal-one-reward" / "pyproject.toml"
    done("mypy", "--config-file", str(config), "--cache-dir", str(folder / "cache"), *sources, at=folder)
