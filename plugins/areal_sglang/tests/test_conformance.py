"""The core's own suite for inference engines, against SGLang's own server on the CPU."""

import pytest

from areal_core.testing.conformance import InferenceEngineSuite

# A first run makes the server's environment, and starting two servers takes a minute; the suite has limits of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestSGLang(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, sglang_engine):
        self.make = sglang_engine

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)
