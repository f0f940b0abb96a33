"""Benchmarks that use the rollout runtime from within still run: no type checker looks at them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "rollout_controller.py --batches 2 --sizes 16 --workers 1",
        pytest.param("rollout_cost.py --tokens 100 --answers 64", marks=pytest.mark.long),
        pytest.param("labels.py --engine hf --live 32 --updates 3", marks=pytest.mark.long),
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
