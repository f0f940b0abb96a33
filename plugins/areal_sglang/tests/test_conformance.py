"""The core's own suite for inference engines, against SGLang's own server, with AREAL_SERVERS_ON_GPU=1 on a GPU."""

import pytest

import areal_sglang.engine
from areal_core.testing.conformance import InferenceEngineSuite
from areal_core.testing.conformance.models import without_tensor
from areal_sglang.adapter import SGLangAdapter

# A first run makes the server's environment, and starting two servers takes a minute; the suite has limits of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestSGLang(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, sglang_engine, server_tolerance):
        self.make, self.tolerance = sglang_engine, server_tolerance

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)


class DroppingAdapter(SGLangAdapter):
    """Leaves one tensor out, a norm of 64 numbers."""

    async def load(self, connection, folder, label, mode):
        await super().load(connection, without_tensor(folder, "model.norm.weight"), label, mode)


def test_an_adapter_that_drops_a_parameter_fails_the_suite(sglang_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(areal_sglang.engine, "SGLangAdapter", DroppingAdapter)
    suite = TestSGLang()
    suite.make = sglang_engine
    with pytest.raises(AssertionError, match="a plain forward pass"):
        suite.test_every_tensor_is_taken_over(tmp_path)
