"""Benchmarks that use the rollout runtime from within still run: no type checker looks at them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.runtime.process_tree import processes_with

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "rollout_controller.py --batches 2 --sizes 16 --workers 1",
        pytest.param("rollout_cost.py --tokens 100 --answers 64", marks=pytest.mark.nightly),
        pytest.param("labels.py --engine hf --live 32 --updates 3", marks=pytest.mark.nightly),
    ],
    ids=lambda command: command.partition(".")[0],
)
def test_a_benchmark_runs(command: str) -> None:
    program, *words = command.split()
    run = [sys.executable, str(ROOT / "benchmarks" / program), *words]
    done = subprocess.run(
        run, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_a_comparison_that_is_asked_to_end_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("areal_hf", reason="the first-party plugins are not installed")
    folder, metrics = tmp_path / "runs", tmp_path / "runs" / "sync" / "metrics.jsonl"
    words = ["grpo/addition", "steps=100000", "--rows", "sync", "--output", str(tmp_path / "curve.json")]
    run = [sys.executable, str(ROOT / "benchmarks" / "curve.py"), *words, "--folder", str(folder)]
    with subprocess.Popen(run) as benchmark:
        deadline = time.monotonic() + 300
        while not metrics.is_file() and benchmark.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_with("AREAL_BENCHMARK_RUN", str(folder / "sync"))) > 2
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(120) == 128 + signal.SIGTERM
    assert processes_with("AREAL_BENCHMARK_RUN", str(folder / "sync")) == []
