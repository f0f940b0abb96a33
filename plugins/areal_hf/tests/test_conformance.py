"""Run the conformance suite of inference engines with servers of this plugin."""

import pytest

from areal_core.servers import ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig
from areal_testing.conformance import InferenceEngineSuite

pytestmark = pytest.mark.nightly  # each test starts a process that imports transformers


class TestHF(InferenceEngineSuite):
    def make_engine(self, folder, *, update_mode, slots):
        settings = HFConfig(update_mode=update_mode, max_concurrent_requests=slots, device="cpu")
        return ServerFleet(HFAdapter(settings), folder)


class DeterministicEngine(InferenceEngineSuite):
    """A suite that pytest does not collect: most of its tests would only repeat those of `TestHF`."""

    def make_engine(self, folder, *, update_mode, slots):
        return ServerFleet(HFAdapter(HFConfig(update_mode=update_mode, device="cpu", deterministic=True)), folder)


@pytest.mark.parametrize(
    "test",
    [
        "test_repeated_requests_give_the_same_bits",
        "test_a_cancelled_request_frees_its_slot",
        pytest.param("test_every_token_carries_the_version_that_sampled_it", marks=pytest.mark.nightly),
    ],
)
def test_deterministic_mode(test, tmp_path):
    getattr(DeterministicEngine(), test)(tmp_path)
