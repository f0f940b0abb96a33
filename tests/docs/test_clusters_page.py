"""The commands of docs/guides/clusters.md that need no cluster: machines that join, and the launcher in one file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "guides" / "clusters.md").read_text(), re.M | re.S)
    for line in block.splitlines()
]
HANG_S = 900


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command in a shell."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_nodes_that_join(tmp_path: Path) -> None:
    run = next(line for line in COMMANDS if "launcher.type=external" in line)
    nodes = [line for line in COMMANDS if re.fullmatch(r"AREAL_NODE=\w+ areal node \S+", line)]
    programs = [start(command, tmp_path) for command in (run, *nodes)]
    said = [program.communicate(timeout=HANG_S)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0], said
    assert "done: 4 steps" in said[0]


def test_a_launcher_in_one_file() -> None:
    command = next(line for line in COMMANDS if "command_launcher.py" in line)
    program = start(f"{command} --dry-run", ROOT / "examples")
    said, _ = program.communicate(timeout=HANG_S)
    assert program.returncode == 0, said
