"""The table of versions: its lock files hold what plugins require and what `areal doctor` calls tested."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_core.plugins import Finding

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "release" / "versions"
ROWS = yaml.safe_load((VERSIONS / "rows.yaml").read_text())
ENVIRONMENTS = {name: wanted for row in ROWS.values() for name, wanted in row["environments"].items()}
ENGINES = {"sglang": "areal_sglang", "vllm": "areal_vllm"}
FOR_TESTS = {"areal-testing"}
"""Distributions that no run needs: the environments are without them."""


def pins(environment: str) -> dict[str, str]:
    """Version by name of a lock file."""
    lines = [line for line in (VERSIONS / f"{environment}.txt").read_text().splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    assert all(str(one.specifier).startswith("==") for one in requirements)
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in requirements}


def projects() -> list[dict]:
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    return [tomllib.loads(path.read_text())["project"] for path in files]


@pytest.mark.parametrize("environment", [name for name, wanted in ENVIRONMENTS.items() if "areal" in wanted])
def test_a_lock_file_holds_what_every_distribution_requires(environment: str) -> None:
    held, ours = pins(environment), {project["name"] for project in projects()}
    for project in (project for project in projects() if project["name"] not in FOR_TESTS):
        for requirement in map(Requirement, project["dependencies"]):
            if requirement.name not in ours:
                assert requirement.specifier.contains(held[canonicalize_name(requirement.name)]), requirement


def test_every_distribution_has_the_same_range_of_transformers() -> None:
    files = [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
    ranges = {}
    for path in files:
        project = tomllib.loads(path.read_text())["project"]
        for extra, lines in {"": project["dependencies"], **project.get("optional-dependencies", {})}.items():
            for requirement in map(Requirement, lines):
                if requirement.name == "transformers":
                    ranges[f"{path.parent.name} {extra}"] = str(requirement.specifier)
    assert len(ranges) >= 7
    assert set(ranges.values()) == {"<6,>=5.17"}, ranges
    assert "transformers>=5.17,<6" in (ROOT / "areal_core" / "runs" / "models.py").read_text()


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_lock_file_is_of_its_row(environment: str) -> None:
    held = pins(environment)
    for line in ENVIRONMENTS[environment]:
        name, _, version = line.partition("==")
        assert not version or held[name] == version
    assert ", ".join(ENVIRONMENTS[environment]) in (VERSIONS / f"{environment}.txt").read_text().splitlines()[0]


@pytest.mark.parametrize(("engine", "package"), ENGINES.items())
def test_doctor_and_extra_know_the_rows(engine: str, package: str) -> None:
    known_beside = import_module(f"{package}.health").RESOLVED
    known = import_module(f"{package}.adapter").KNOWN
    beside = [name for name, wanted in ENVIRONMENTS.items() if "areal" in wanted]
    rows = {held[engine]: held for held in map(pins, beside) if engine in held}
    assert {one: {name: held[name] for name in known_beside[one]} for one, held in rows.items()} == known_beside
    project = tomllib.loads((ROOT / "plugins" / package / "pyproject.toml").read_text())["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["engine"])
    assert (extra.name, extra.specifier) == (engine, known)
    assert all(known.contains(version) for version in known_beside)


@pytest.mark.parametrize(
    ("version", "torch", "finding"),
    [
        ("0.5.23", "2.14.1", Finding(True, "sglang 0.5.23")),
        ("0.5.23", "2.13.0+cpu", Finding(True, "sglang 0.5.23; torch 2.13.0 (in the table 2.14.1)")),
        ("0.5.18", "2.13.0", Finding(True, "sglang 0.5.18")),
        ("0.4.0", "2.13.0", Finding(False, "sglang 0.4.0; this plugin was tested with <0.5.24,>=0.5.17")),
    ],
)
def test_doctor_says_where_an_environment_differs(
    version: str, torch: str, finding: Finding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, installed in {"sglang": version, "torch": torch, "transformers": "5.19.0"}.items():
        folder = tmp_path / f"{name}-{installed}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert import_module("areal_sglang.health").check_program() == finding
