"""The core's own suite for training engines."""

import pytest

from areal_core.testing.conformance import TrainEngineSuite
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

pytestmark = pytest.mark.slow


class TestFSDPEngine(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings))


class TestWithActivationCheckpointing(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings, activation_checkpointing="full", logprob_chunk_tokens=7))


class TestWithLittleMemory(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(
            FSDPConfig(
                **settings,
                activation_checkpointing="selective",
                optimizer_state_dtype="bfloat16",
                offload_optimizer=True,
            )
        )
