"""A folder with a config whose parts are files beside it, and `areal` run in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = """\
from areal_core.config import Settings


class Part:
    def __init__(self, *_, **__): ...


class Rows:
    def __init__(self, count: int = 10):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return {"prompt": str(row)}


def exact(completion):
    return 1.0
"""

RUN = """\
steps: 5
model: {path: tiny}
dataset: parts.py:Rows
workflow: parts.py:Part
rewards: ["parts.py:exact"]
inference_engine: parts.py:Part
train_engine: parts.py:Part
algorithm: parts.py:Part
"""


@dataclass
class Outcome:
    """What a program did."""

    code: int
    out: str
    err: str


class Place:
    """A folder in which programs run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, *words: str) -> Outcome:
        """Run Python with these words."""
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, capture_output=True, text=True, timeout=240, check=False
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With `run.yaml` and the parts that it names."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return Place(tmp_path)


@pytest.fixture(scope="session")
def sums_server() -> Iterator[str]:
    """Address of a server in a process of its own, see `sums_server.py`; its key is `right`."""
    program = Path(__file__).with_name("sums_server.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(program)], **pipes) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.communicate(timeout=300)
