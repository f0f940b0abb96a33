"""The command `areal environments`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from areal_agents.listing import main
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """An interpreter that sees a folder of packages as pip installs them."""
    for name, version, needs in (
        ("nemo-gym", "0.4.0", ""),
        ("openenv", "0.10.0", ""),
        ("echo-env", "1", "openenv>=0.4"),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        needed = f"Requires-Dist: {needs}\n" if needs else ""
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        (folder / "RECORD").write_text("echo_env/__init__.py,,\n" if needs else "")
    files = {
        "echo_env/__init__.py": "",
        "echo_env/server/app.py": "raise SystemExit('a listing must not import it')",
        "resources_servers/sums/app.py": "raise SystemExit('a listing must not import it')",
        "resources_servers/sums/requirements.txt": "-e nemo-gym[dev] @ ../../\nno-such-package==1.0\npytest\n",
        "resources_servers/plain/app.py": "",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_environments_of_another_interpreter_are_listed_with_what_they_need(
    libraries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--python", str(libraries), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in rows if row["name"]}
    assert found["sums"] == {
        "library": "nemo-gym",
        "version": "0.4.0",
        "name": "sums",
        "use": "agents/nemo_gym server: sums",
        "needs": ["no-such-package"],
        "python": str(libraries),
    }
    assert found["plain"]["needs"] == []
    assert found["echo_env"]["use"] == "agents/openenv app: echo_env.server.app:app"
    (verifiers,) = (row for row in rows if row["library"] == "verifiers")
    assert "pip install verifiers" in verifiers["needs"][0]


def test_the_table_says_how_to_install_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["library", "version", "environment", "in", "a", "config", "needs"]
    for name in ("gymnasium", "reasoning-gym", "harbor", "verifiers", "nemo-gym", "openenv"):
        assert any(line.startswith(name) for line in lines)


def test_an_interpreter_that_cannot_be_asked_is_named() -> None:
    with pytest.raises(UsageError, match="/no/python cannot list its environments"):
        main(["--python", "/no/python"])


@pytest.mark.parametrize("output", ["", "[1, 2]", '[{"library": "other"}]', "\\237\\237"])
def test_a_program_that_is_no_interpreter_is_named(tmp_path: Path, output: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="is no Python interpreter: it printed"):
        main(["--python", str(program)])
