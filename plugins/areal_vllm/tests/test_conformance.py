"""The core's own suite for inference engines, against vLLM's own server on the CPU."""

import pytest

from areal_core.testing.conformance import InferenceEngineSuite

# A first run makes the server's environment, and starting two servers takes a minute; the suite has limits of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestVLLM(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, vllm_engine):
        self.make = vllm_engine

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)
