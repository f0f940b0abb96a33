"""True runs on a true SLURM: whole, with a process killed, with a node lost, with the parent killed, and in turns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

CONFIG = """\
plugins: [grpo, hf, fsdp]
steps: 5
deterministic: true
model: {path: model}
dataset: grpo/additions
workflow: single_turn
rewards: [grpo/right_result, "parts.py:digits"]
sampling: {max_new_tokens: 8}
rollout: {batch_size: 4, group_size: 4, max_staleness: 0, stall_timeout_s: 600}
inference_engine: {type: hf, max_concurrent_requests: 16}
train_engine: {type: fsdp, learning_rate: 1e-2}
algorithm: grpo
checkpoint: {every: 1}
launcher: {type: slurm, trainer_processes: 2}
"""
PARTS = """\
import os, time

def digits(completion):
    time.sleep(float(os.environ.get("TEST_SLOWNESS_S", "0")))
    return sum(character.isdigit() for character in completion) / 8
"""
MODEL = """\
from pathlib import Path
from areal_grpo.demonstration.model import make_model
make_model(Path("model"), hidden=32, layers=1, heads=2)
"""


class Workplace:
    """A folder with a tiny model and a config, and the cluster that runs it."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "run"
        self.log = self.run / "slurm.log"
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "parts.py").write_text(PARTS)
        subprocess.run([sys.executable, "-c", MODEL], cwd=folder, env=cluster.environment, check=True)

    def submit(self, *words: str) -> str:
        """Submit the run; the number of its job."""
        said = self.cluster.areal("slurm", "submit", "run.yaml", "run_dir=run", *words, folder=self.folder)
        return re.search(r"^job +(\d+)$", said, re.MULTILINE)[1]  # type: ignore[index]

    def resume(self, *words: str) -> str:
        """Submit a job that goes on with the run."""
        said = self.cluster.areal("slurm", "submit", "--resume", "run", *words, folder=self.folder)
        return re.search(r"^job +(\d+)$", said, re.MULTILINE)[1]  # type: ignore[index]

    def finish(self, job: str, seconds: float = 800) -> str:
        """Wait for the job to complete; what it wrote."""
        self.cluster.wait_for_job(job, ["COMPLETED"], self.log, seconds)
        return self.log.read_text()

    def steps(self, run: str = "run") -> list[int]:
        """The steps that metrics tell of."""
        return [line["step"] for line in RunFolder(self.folder / run).read_metrics()]

    def weights(self, run: str = "run") -> bytes:
        """The exported parameters of a run."""
        return (self.folder / run / "model" / "model.safetensors").read_bytes()

    def processes(self, words: str = "") -> list[int]:
        """What runs anywhere of the run, whose command line or name in the run has these words."""
        return [pid for pid, text in _processes(self.run) if words in text]

    def audit(self) -> None:
        """Nothing is lost, and nothing was trained on twice."""
        assert not json.loads(self.cluster.areal("audit", "run", "--json", folder=self.folder))["problems"]


def _processes(run: Path) -> list[tuple[int, str]]:
    """Processes of a run in any namespace, with command line and name in the run; keepers and wardens, which have the
    run's token, are among them."""
    tokens = {path.read_text() for path in run.glob("epochs/*/token")}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        variables = dict(line.partition("=")[::2] for line in environment)
        if variables.get("AREAL_TOKEN", "-") in tokens or f"--resume {run}" in command:
            found.append((int(path.name), f"{command} {variables.get('AREAL_PROCESS', '')}"))
    return found


@pytest.fixture
def workplace(cluster: Any, tmp_path: Path) -> Workplace:
    """A place to submit runs from."""
    return Workplace(cluster, tmp_path)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Waits until something is so."""
    import time

    def wait(condition: Callable[[], object], what: str, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
            time.sleep(0.05)

    return wait


def test_a_run_on_three_nodes(workplace: Workplace) -> None:
    log = workplace.finish(workplace.submit("--nodes=3", "--gres=gpu:2"))
    assert workplace.steps() == [1, 2, 3, 4, 5], log
    workplace.audit()
    assert not workplace.processes()
