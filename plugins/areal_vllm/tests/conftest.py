"""Real servers for the conformance suite, and recorded answers of one for the adapter's own tests."""

import json
from pathlib import Path

import pytest

from areal_core.servers import ServerFleet
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig


@pytest.fixture(scope="module")
def vllm_engine(server_of_each_shape, engine_by_model, vllm_program, vllm_options, server_environment):
    """Make fleets of two running servers, which the adapter's own command has started."""
    settings = VLLMConfig(program=vllm_program, options=vllm_options, environment=server_environment, stream_interval=8)
    address_of = server_of_each_shape(VLLMAdapter(settings))

    def make(folder, update_mode, slots, adapter=VLLMAdapter):
        def engine(address):
            changes = {"servers": 0, "addresses": [address], "start_timeout_s": 60.0}
            changes |= {"update_mode": update_mode, "max_concurrent_requests": slots}
            return ServerFleet(adapter(settings.model_copy(update=changes)), folder)

        return engine_by_model(engine, address_of)

    return make


@pytest.fixture(scope="session")
def recorded():
    """Return answers of vLLM 0.32.0 by route. A weight update happened during `/inference/v1/generate`."""
    return json.loads((Path(__file__).parent / "recorded.json").read_text())
