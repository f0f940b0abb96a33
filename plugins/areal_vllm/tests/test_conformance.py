"""The core's own suite for inference engines, against vLLM's own server on the CPU."""

import pytest
from safetensors.torch import load_file, save_file

import areal_vllm.engine
from areal_core.testing.conformance import InferenceEngineSuite
from areal_vllm.adapter import VLLMAdapter

# A first run makes the server's environment, and starting two servers takes a minute; the suite has limits of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestVLLM(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, vllm_engine):
        self.make = vllm_engine

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)


class DroppingAdapter(VLLMAdapter):
    """Leaves one tensor out, a norm of 64 numbers."""

    async def load(self, connection, folder, label, mode):
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        rest = folder / "without_norm"
        rest.mkdir(exist_ok=True)
        (rest / "config.json").write_text((folder / "config.json").read_text())
        save_file(tensors, rest / "model.safetensors", metadata={"format": "pt"})
        await super().load(connection, rest, label, mode)


def test_an_adapter_that_drops_a_parameter_fails_the_suite(vllm_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(areal_vllm.engine, "VLLMAdapter", DroppingAdapter)
    suite = TestVLLM()
    suite.make = vllm_engine
    with pytest.raises(AssertionError, match="a plain forward pass"):
        suite.test_every_tensor_is_taken_over(tmp_path)
