"""Test the adapter's requests to an SGLang server of a VLM."""

import copy
import json
from pathlib import Path

import pytest

from areal_core.engines import ModelReference
from areal_core.inference.adapter import PartialGeneration
from areal_core.inference.errors import ServerRefusedError
from areal_core.models.images import Prompt
from areal_core.servers import SamplingParameters
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_sglang.images import collapsed

SCRATCH = Path("/scratch")
IMAGE, VIDEO = 2, 3
IDS = [5, IMAGE, IMAGE, IMAGE, 4, IMAGE, IMAGE, 8, IMAGE]


@pytest.fixture
def model(tmp_path):
    config = {"model_type": "qwen2_vl", "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelReference(str(tmp_path), "float32")


def test_each_image_has_one_token_that_sglang_repeats():
    placed = Prompt([9, IMAGE, IMAGE, IMAGE, 4, IMAGE, 4, 7], [(1, 3), (5, 1)])
    assert collapsed(placed) == [9, IMAGE, 4, IMAGE, 4, 7]


@pytest.fixture
def call_adapter(adapter_call, model):
    def call(answers, ask):
        """Call a method of the model's adapter with these answers. Return its result and the server's requests."""
        adapter = SGLangAdapter(SGLangConfig())
        adapter.serve(model)
        return adapter_call(answers, lambda connection: ask(adapter, connection))

    return call


@pytest.fixture
def generated(call_adapter):
    def generate(events, images=("one", "two"), **sampling):
        partial = PartialGeneration("r1.1", IDS, SamplingParameters(max_new_tokens=64, **sampling), 3, "0", images)

        async def collect(adapter, connection):
            return [chunk async for chunk in adapter.generate(connection, partial)]

        return call_adapter({"/generate": {"events": events}}, collect)

    return generate


@pytest.fixture
def events(recorded):
    """Return a recorded answer to a prompt of `IDS`."""
    copies = copy.deepcopy(recorded["incremental"])
    for event in copies:
        event["meta_info"]["prompt_tokens"] = len(IDS)
    return copies


def test_servers_cache_patches_and_no_embeddings(model):
    adapter = SGLangAdapter(SGLangConfig())
    command = adapter.command(model, "127.0.0.1", 8000, SCRATCH)
    arguments = list(command.arguments)
    assert int(arguments[arguments.index("--mm-preprocess-cache-size-mb") + 1]) > 0
    assert "--mm-process-config" not in arguments, "the folder has no sizes"
    assert command.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    text = adapter.command(ModelReference("/model"), "127.0.0.1", 8000, SCRATCH)
    assert "--mm-preprocess-cache-size-mb" not in text.arguments
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in text.environment


@pytest.mark.parametrize(
    "processor",
    [{"size": {"shortest_edge": 64, "longest_edge": 4096}}, {"min_pixels": 64, "max_pixels": 4096, "size": {}}],
)
def test_image_sizes_are_those_of_the_model(model, processor):
    (Path(model.path) / "preprocessor_config.json").write_text(json.dumps(processor))
    arguments = list(SGLangAdapter(SGLangConfig()).command(model, "127.0.0.1", 8000, SCRATCH).arguments)
    config = json.loads(arguments[arguments.index("--mm-process-config") + 1])
    assert config == {"image": {"size": {"shortest_edge": 64, "longest_edge": 4096}}}


@pytest.mark.parametrize("changes", [{"version": "0.5.22"}, {"mm_preprocess_cache_size_mb": None}])
def test_servers_that_would_tokenize_prompts_again_are_refused(call_adapter, recorded, changes):
    server_info = recorded["/server_info"] | {"mm_preprocess_cache_size_mb": 256}
    identity, _ = call_adapter({"/server_info": server_info}, lambda adapter, connection: adapter.identify(connection))
    assert identity.reports_spans
    with pytest.raises(ServerRefusedError, match=r"has a VLM: that needs 0\.5\.23 or later"):
        call_adapter({"/server_info": server_info | changes}, lambda adapter, connection: adapter.identify(connection))


def test_an_image_is_one_token_and_image_tokens_of_the_policy_are_padding(generated, events):
    _, (body,) = generated(events)
    assert body["input_ids"] == [5, IMAGE, 4, IMAGE, 8, 0]
    assert body["image_data"] == ["one", "two"]
    assert body["sampling_params"]["stop_token_ids"] == [IMAGE, VIDEO]
    assert not body["sampling_params"]["ignore_eos"]
    _, (body,) = generated(events, images=())
    assert body["input_ids"] == [5, 0, 0, 0, 4, 0, 0, 8, 0]
    assert "image_data" not in body


def test_a_server_with_another_preprocessor_raises(generated, events):
    events[0]["meta_info"]["prompt_tokens"] = 7
    with pytest.raises(ValueError, match=r"makes 7 tokens of a prompt with images that has 9 here"):
        generated(events)


def test_generation_continues_after_an_image_token_of_the_policy(generated, events):
    last = events[-1]
    last["output_ids"][-1] = IMAGE
    last["meta_info"]["finish_reason"] = {"type": "stop", "matched": IMAGE}
    chunks, _ = generated(events)
    assert chunks[-1].finish == "abort"
    chunks, _ = generated(events, stop_token_ids=(IMAGE,))
    assert chunks[-1].finish == "stop"
    with pytest.raises(ValueError, match="stop texts and penalties"):
        generated(events, repetition_penalty=1.1)
