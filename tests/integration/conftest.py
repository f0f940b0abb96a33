"""Real runs: real processes, a real (tiny) model, `areal` as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_grpo.demonstration.model import make_model

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = """\
plugins: [grpo, hf, fsdp, view]
steps: 4
model: {path: model}
dataset: grpo/additions
workflow: single_turn
rewards:
  - type: grpo/right_result
  - "parts.py:digits"
sampling: {max_new_tokens: 8}
rollout: {batch_size: 4, group_size: 4, max_staleness: 1, stall_timeout_s: 600}
inference_engine: {type: hf, max_concurrent_requests: 32}
train_engine: {type: fsdp, learning_rate: 1e-2}
algorithm: grpo
"""

PARTS = """\
def digits(completion):
    return sum(character.isdigit() for character in completion) / 8
"""


@dataclass
class Outcome:
    """What a program did."""

    code: int
    out: str
    err: str


class Workplace:
    """A folder with a tiny model and a config, in which `areal` is run."""

    command = (sys.executable, "-m", "areal_core")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "AREAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `areal` and return at once."""
        return subprocess.Popen(
            [*self.command, *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def areal(self, *words: str, timeout: float = 600) -> Outcome:
        """Run `areal` to its end."""
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout)
        return Outcome(process.returncode, out, err)

    def processes(self, process: subprocess.Popen[str], words: str) -> list[int]:
        """What a program has started, and what these have, whose command line or name has these words."""
        return [pid for pid in descendants(process.pid) if words in program(pid)]

    def metrics(self, run: str = "run") -> list[dict[str, Any]]:
        """Lines of a run's metrics."""
        path = self.folder / run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def weights(self, run: str = "run") -> bytes:
        """The exported parameters of a run."""
        return (self.folder / run / "model" / "model.safetensors").read_bytes()

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 600) -> None:
        """Wait until something is so, and fail with the program's words where it ends before."""
        import time

        deadline = time.monotonic() + seconds
        while not condition():
            if process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Everything that a process has started, and what these have."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                children.append(int(path.parent.name))
    return children + [deeper for child in children for deeper in descendants(child)]


def program(pid: int) -> str:
    """The command line of a process, and its name within its run; keepers have none."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        names = [v for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if v.startswith(b"AREAL_PROCESS=")]
        return "" if "keeper.py" in command else f"{command} {names[0].decode() if names else ''}"
    return ""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model with random weights."""
    return make_model(tmp_path_factory.mktemp("model") / "model", hidden=32, layers=1, heads=2)


@pytest.fixture
def lay_out(tiny_model: Path) -> Callable[[Path], None]:
    """Puts the tiny model, `run.yaml` and what it names into a folder."""

    def lay_out(folder: Path) -> None:
        (folder / "model").symlink_to(tiny_model)
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "parts.py").write_text(PARTS)

    return lay_out


@pytest.fixture
def workplace(tmp_path: Path, lay_out: Callable[[Path], None]) -> Workplace:
    """A place to run `areal` in."""
    lay_out(tmp_path)
    return Workplace(tmp_path)
