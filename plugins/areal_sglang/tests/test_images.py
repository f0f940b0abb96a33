"""What the adapter asks of an SGLang server whose model sees."""

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


def test_each_image_has_one_token_which_sglang_repeats():
    placed = Prompt([9, IMAGE, IMAGE, IMAGE, 4, IMAGE, 4, 7], [(1, 3), (5, 1)])
    assert collapsed(placed) == [9, IMAGE, 4, IMAGE, 4, 7]


@pytest.fixture
def called(adapter_call, model):
    def call(answers, ask):
        """What an adapter of this model gives against a server of these answers, and what the server was sent."""

        adapter = SGLangAdapter(SGLangConfig())
        adapter.serve(model)
        return adapter_call(answers, lambda connection: ask(adapter, connection))

    return call


@pytest.fixture
def generated(called):
    def generate(events, images=("one", "two"), **sampling):
        partial = PartialGeneration("r1.1", IDS, SamplingParameters(max_new_tokens=64, **sampling), 3, "0", images)

        async def collect(adapter, connection):
            return [chunk async for chunk in adapter.generate(connection, partial)]

        return called({"/generate": {"events": events}}, collect)

    return generate


@pytest.fixture
def events(recorded):
    """A recorded answer, as if to a prompt of `IDS`."""
    found = copy.deepcopy(recorded["incremental"])
    for event in found:
        event["meta_info"]["prompt_tokens"] = len(IDS)
    return found


def test_servers_keep_patches_and_no_embeddings(model):
    adapter = SGLangAdapter(SGLangConfig())
    command = adapter.command(model, "127.0.0.1", 8000, SCRATCH)
    words = list(command.arguments)
    assert int(words[words.index("--mm-preprocess-cache-size-mb") + 1]) > 0
    assert "--mm-process-config" not in words, "the folder says nothing of sizes"
    assert command.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    text = adapter.command(ModelReference("/model"), "127.0.0.1", 8000, SCRATCH)
    assert "--mm-preprocess-cache-size-mb" not in text.arguments
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in text.environment


@pytest.mark.parametrize(
    "told", [{"size": {"shortest_edge": 64, "longest_edge": 4096}}, {"min_pixels": 64, "max_pixels": 4096, "size": {}}]
)
def test_images_are_as_large_as_the_model_says(model, told):
    (Path(model.path) / "preprocessor_config.json").write_text(json.dumps(told))
    words = list(SGLangAdapter(SGLangConfig()).command(model, "127.0.0.1", 8000, SCRATCH).arguments)
    asked = json.loads(words[words.index("--mm-process-config") + 1])
    assert asked == {"image": {"size": {"shortest_edge": 64, "longest_edge": 4096}}}


@pytest.mark.parametrize("changes", [{"version": "0.5.22"}, {"mm_preprocess_cache_size_mb": None}])
def test_servers_that_would_put_images_into_text_are_refused(called, recorded, changes):
    told = recorded["/server_info"] | {"mm_preprocess_cache_size_mb": 256}
    found, _ = called({"/server_info": told}, lambda adapter, connection: adapter.identify(connection))
    assert found.reports_spans
    with pytest.raises(ServerRefusedError, match=r"has a VLM: that needs 0\.5\.23 or later"):
        called({"/server_info": told | changes}, lambda adapter, connection: adapter.identify(connection))


def test_an_image_is_one_token_and_what_a_policy_wrote_is_padding(generated, events):
    _, (body,) = generated(events)
    assert body["input_ids"] == [5, IMAGE, 4, IMAGE, 8, 0]
    assert body["image_data"] == ["one", "two"]
    assert body["sampling_params"]["stop_token_ids"] == [IMAGE, VIDEO]
    assert not body["sampling_params"]["ignore_eos"]
    _, (body,) = generated(events, images=())
    assert body["input_ids"] == [5, 0, 0, 0, 4, 0, 0, 8, 0]
    assert "image_data" not in body


def test_a_server_that_cuts_images_in_another_way_is_found_out(generated, events):
    events[0]["meta_info"]["prompt_tokens"] = 7
    with pytest.raises(ValueError, match=r"makes 7 tokens of a prompt with images that has 9 here"):
        generated(events)


def test_generation_goes_on_behind_an_image_token_that_the_policy_wrote(generated, events):
    last = events[-1]
    last["output_ids"][-1] = IMAGE
    last["meta_info"]["finish_reason"] = {"type": "stop", "matched": IMAGE}
    chunks, _ = generated(events)
    assert chunks[-1].finish == "abort"
    chunks, _ = generated(events, stop_token_ids=(IMAGE,))
    assert chunks[-1].finish == "stop"
    with pytest.raises(ValueError, match="stop texts and penalties"):
        generated(events, repetition_penalty=1.1)
