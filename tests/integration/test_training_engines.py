"""A run may change its training engine: from the same settings each makes the same of a model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR
from areal_deepspeed.config import DeepSpeedConfig
from areal_deepspeed.engine import DeepSpeedEngine
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_testing.conformance import make_model
from areal_testing.conformance.training_session import (
    OUTPUTS,
    make_training_batch,
    parameters_of,
    policy_loss,
    train,
)

pytestmark = pytest.mark.slow
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95), "epsilon": 1e-6, "warmup_steps": 2}
SETTINGS |= {"schedule": "cosine", "minimum_learning_rate_ratio": 0.1, "max_gradient_norm": 0.3}
SETTINGS |= {"max_tokens_per_microbatch": 40}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_becomes_what_fsdp_becomes(stage: int, tmp_path: Path) -> None:
    """In a process of its own: DeepSpeed remembers the first process group that it meets."""
    words = [sys.executable, __file__, str(stage), str(tmp_path / "model")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def compare(stage: int, folder: Path) -> None:
    """Decay of matrices alone, clipping, warm-up and cosine: the same metrics and parameters after five updates."""
    model, batch = ModelReference(str(make_model(folder))), make_training_batch()
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engines = [FSDPEngine(FSDPConfig(**SETTINGS)), DeepSpeedEngine(DeepSpeedConfig(config=zero, **SETTINGS))]
    metrics, parameters = [], []
    for engine in engines:
        engine.setup(model, ACTOR, OptimizerSettings(total_updates=6, temperature=0.7))
        metrics.append([train(engine, batch, policy_loss, OUTPUTS) for _ in range(5)])
        parameters.append(parameters_of(engine))
        engine.close()
    for wanted, found in zip(*metrics, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert metrics[0][0]["gradient_norm"] > 0.3, "nothing is clipped"
    for name, value in parameters[0].items():
        torch.testing.assert_close(parameters[1][name], value, atol=1e-5, rtol=0)


if __name__ == "__main__":
    compare(int(sys.argv[1]), Path(sys.argv[2]))
