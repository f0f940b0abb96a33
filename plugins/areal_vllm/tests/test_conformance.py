"""Run the conformance suite of inference engines with vLLM servers; with AREAL_SERVERS_ON_GPU=1, on a GPU."""

from functools import partial

import pytest

from areal_testing.conformance import InferenceEngineSuite
from areal_testing.conformance.models import without_tensor
from areal_vllm.adapter import VLLMAdapter

# The first run creates the server's environment, and two servers start in a minute. The suite has its own timeouts.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestVLLM(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, vllm_engine, server_tolerance):
        self.make, self.tolerance = vllm_engine, server_tolerance

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)


class DroppingAdapter(VLLMAdapter):
    """Does not load one tensor, a norm with 64 numbers."""

    async def load(self, connection, folder, label, mode):
        await super().load(connection, without_tensor(folder, "model.norm.weight"), label, mode)


def test_an_adapter_that_drops_a_parameter_fails_the_suite(vllm_engine, tmp_path):
    suite = TestVLLM()
    suite.make = partial(vllm_engine, adapter=DroppingAdapter)
    with pytest.raises(AssertionError, match="a plain forward pass"):
        suite.test_every_tensor_is_taken_over(tmp_path)
