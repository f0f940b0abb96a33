"""Every command below "SLURM" in docs/guides/clusters.md is run, in its order, on a true SLURM."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = """\
plugins: [grpo, hf, fsdp]
steps: 1000
model: {path: model}
dataset: grpo/additions
workflow: single_turn
rewards: [grpo/right_result]
sampling: {max_new_tokens: 8}
rollout: {batch_size: 4, group_size: 4, max_staleness: 1, stall_timeout_s: 600}
inference_engine: {type: hf, max_concurrent_requests: 16}
train_engine: {type: fsdp, learning_rate: 1e-2}
algorithm: grpo
"""
MODEL = """\
from pathlib import Path
from areal_grpo.demonstration.model import make_model
make_model(Path("model"), hidden=32, layers=1, heads=2)
"""
ENDS = ("COMPLETED", "FAILED", "CANCELLED")


def test_its_commands(cluster: Any, tmp_path: Path) -> None:
    section = PAGE.read_text().partition("\n## SLURM\n")[2].partition("\n## ")[0]
    commands = [line for block in BLOCK.findall(section) for line in block.splitlines()]
    assert len(commands) > 10
    (tmp_path / "my.yaml").write_text(CONFIG)
    subprocess.run([sys.executable, "-c", MODEL], cwd=tmp_path, env=cluster.environment, check=True)
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    job, said = "", {}
    for command in commands:
        line = ["env", f"PATH={path}", "bash", "-c", re.sub(r"\bJOB\b", job, command)]
        said[command] = cluster.run(*line, folder=tmp_path)
        if found := re.search(r"^job +(\d+)$", said[command], re.MULTILINE):
            job, folder = found[1], re.findall(r"^run folder +(\S+)$", said[command], re.MULTILINE)[0]
            if "steps=2" in command and "--array" not in command:
                cluster.wait_for_job(job, ["COMPLETED"], Path(folder) / "slurm.log")
            elif "--array" not in command:
                wait_for_training(cluster, job, Path(folder))
        elif command.startswith("scancel"):
            cluster.wait_for_job(job, ["FAILED", "CANCELLED"], Path(folder) / "slurm.log")
            cluster.wait_idle()
    for number in (0, 1):
        cluster.wait_for_job(f"{job_of_array(said)}_{number}", ["COMPLETED"], tmp_path / "none")
    assert "stopped after a checkpoint" in (tmp_path / "runs" / "first" / "slurm.log").read_text()
    assert "done: 2 steps" in next(text for command, text in said.items() if command.startswith("salloc"))


def job_of_array(said: dict[str, str]) -> str:
    text = next(text for command, text in said.items() if "--array" in command)
    return re.search(r"^job +(\d+)$", text, re.MULTILINE)[1]  # type: ignore[index]


def wait_for_training(cluster: Any, job: str, run: Path) -> None:
    """Until the job has trained a step."""
    cluster.wait_for_job(job, ["RUNNING"], run / "slurm.log")
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 400
    before = metrics.stat().st_size if metrics.is_file() else 0
    while not (metrics.is_file() and metrics.stat().st_size > before):
        assert cluster.job(job)["JobState"] not in ENDS, (run / "slurm.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
