"""The core's own suite for inference engines, with the generating process as it is in a run."""

from areal_core.testing.conformance import InferenceEngineSuite
from areal_hf.client import HFEngine
from areal_hf.config import HFConfig


class TestHFEngine(InferenceEngineSuite):
    def make_engine(self, folder, *, update_mode, slots):
        return HFEngine(HFConfig(update_mode=update_mode, max_concurrent_requests=slots, device="cpu"), folder, folder)


class TestDeterministicHFEngine(InferenceEngineSuite):
    def make_engine(self, folder, *, update_mode, slots):
        return HFEngine(HFConfig(update_mode=update_mode, device="cpu"), folder, folder, deterministic=True)
