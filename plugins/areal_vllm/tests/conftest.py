"""True servers for the conformance suite, and recorded answers of one for the adapter's own tests."""

import json
from pathlib import Path

import pytest

from areal_core.servers import ServerFleet
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig


@pytest.fixture(scope="module")
def vllm_engine(server_of_each_shape, engine_by_model, vllm_program, vllm_options, server_environment):
    """Makes fleets on two servers that are started once, by the adapter's own command line."""
    started = VLLMConfig(program=vllm_program, options=vllm_options, environment=server_environment, stream_interval=8)
    address_of = server_of_each_shape(VLLMAdapter(started))

    def make(folder, update_mode, slots, adapter=VLLMAdapter):
        def engine(address):
            changes = {"servers": 0, "addresses": [address], "start_timeout_s": 60.0}
            changes |= {"update_mode": update_mode, "max_concurrent_requests": slots}
            return ServerFleet(adapter(started.model_copy(update=changes)), folder)

        return engine_by_model(engine, address_of)

    return make


@pytest.fixture(scope="session")
def recorded():
    """Answers of vLLM 0.32.0 by the path that was asked; `/inference/v1/generate` met a weight update."""
    return json.loads((Path(__file__).parent / "recorded.json").read_text())
