"""The core's own suite for training engines."""

import importlib.util

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: see the README of areal-deepspeed", allow_module_level=True)

from areal_deepspeed.config import DeepSpeedConfig
from areal_deepspeed.engine import DeepSpeedEngine
from areal_testing.conformance import TrainEngineSuite

pytestmark = pytest.mark.slow


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.nightly
class TestZeRO2(TrainEngineSuite):
    more_outputs = ("top_logprobs", "sum_pi_squared")

    def make_engine(self, **settings):
        return DeepSpeedEngine(DeepSpeedConfig(config=zero(2), **settings))


@pytest.mark.nightly
class TestZeRO3(TrainEngineSuite):
    more_outputs = ("top_logprobs", "sum_pi_squared")

    def make_engine(self, **settings):
        divided = zero(3, stage3_param_persistence_threshold=0)
        return DeepSpeedEngine(DeepSpeedConfig(config=divided, **settings))
