"""The core's suite for training engines in every layout of ranks, with gloo on the CPU or NCCL on GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nightly
OF_ALL_RANKS = ("test_sequence_groups_stay_whole", "test_the_loss_sees_every_token_once")
"""Tests that check the whole batch in the loss: a data-parallel rank gets a part. `test_ranks.py` covers them."""
LAYOUTS = [
    pytest.param(2, {"parallel": {"tensor": 2}}, id="tensor2"),
    pytest.param(2, {"parallel": {"context": 2}}, id="context2"),
    pytest.param(2, {}, id="data2"),
    pytest.param(2, {"parallel": {"replicas": 2}}, id="replicas2"),
    pytest.param(4, {"parallel": {"data": 2, "tensor": 2}}, id="data2-tensor2"),
    pytest.param(4, {"parallel": {"context": 2, "tensor": 2}}, id="context2-tensor2"),
    pytest.param(4, {"parallel": {"data": 2, "context": 2, "replicas": 2}}, id="replicas2-context2"),
]


@pytest.mark.parametrize(("count", "settings"), LAYOUTS)
def test_the_suite_on_several_ranks(tmp_path, count, settings):
    """Every rank runs the suite; the test shows the first failure."""
    hidden_gpus = {} if torch.cuda.device_count() >= count else {"CUDA_VISIBLE_DEVICES": ""}
    everywhere = {
        **os.environ,
        **hidden_gpus,
        "RANKS": str(count),
        "STORE": str(tmp_path / "store"),
        "FOLDER": str(tmp_path / "folders"),
        "SETTINGS": json.dumps(settings),
    }
    together = settings.get("parallel", {}).get("context", 1) * settings.get("parallel", {}).get("tensor", 1)
    left_out = ["-k", f"not ({' or '.join(OF_ALL_RANKS)})"] if together < count else []
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *left_out]
    processes = [
        subprocess.Popen(
            [*command, "--show-capture=no", "--timeout=600", "layout_suite.py"],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=900)
            assert process.returncode == 0, output
            assert "passed" in output
            assert "skipped" not in output
    finally:
        for process in processes:
            process.kill()
