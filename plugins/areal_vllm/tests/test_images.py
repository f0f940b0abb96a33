"""Test the adapter's requests to a vLLM server of a VLM."""

import copy
import io
from base64 import b64decode, b64encode
from pathlib import Path

import msgpack
import pytest
import torch
from PIL import Image

from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.inference.adapter import PartialGeneration
from areal_core.inference.errors import ServerRefusedError
from areal_core.servers import SamplingParameters
from areal_vision.images import ImageReader
from areal_vision.tiny_model import make_model
from areal_vllm.adapter import VLLMAdapter
from areal_vllm.config import VLLMConfig

SCRATCH = Path("/scratch")
GENERATE, IMAGE, VIDEO = "/inference/v1/generate", 2, 5
IDS = [6, 3, *[IMAGE] * 4, 4, 3, *[IMAGE] * 8, 4, 9, IMAGE]
SERVED = {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def images():
    """Return image files in base64: one image of four image tokens, and one of eight."""
    files = []
    for width, color in ((32, (200, 10, 10)), (64, (10, 10, 200))):
        file = io.BytesIO()
        Image.new("RGB", (width, 32), color).save(file, "PNG")
        files.append(b64encode(file.getvalue()).decode())
    return tuple(files)


@pytest.fixture
def call_adapter(adapter_call, folder):
    def call(answers, ask, dtype="bfloat16"):
        """Call a method of the model's adapter with these answers. Return its result and the server's requests."""
        adapter = VLLMAdapter(VLLMConfig())
        adapter.serve(ModelReference(str(folder), dtype))
        return adapter_call(answers, lambda connection: ask(adapter, connection))

    return call


@pytest.fixture
def generated(call_adapter, recorded, images):
    def generate(ids=IDS, shown=images, answers=recorded, **sampling):
        partial = PartialGeneration("r1.1", ids, SamplingParameters(max_new_tokens=64, **sampling), 3, "0", shown)

        async def collect(adapter, connection):
            return [chunk async for chunk in adapter.generate(connection, partial)]

        return call_adapter(answers, collect)

    return generate


def test_servers_accept_patches_without_changes(folder):
    adapter = VLLMAdapter(VLLMConfig())
    arguments = list(adapter.command(ModelReference(str(folder)), "127.0.0.1", 8000, SCRATCH).arguments)
    assert "--no-mm-device-do-normalize" in arguments
    assert arguments[arguments.index("--mm-processor-cache-gb") + 1] == "0"
    assert "--skip-tokenizer-init" not in arguments, "vLLM's image processor needs one"
    arguments = list(adapter.command(ModelReference("/model"), "127.0.0.1", 8000, SCRATCH).arguments)
    assert "--no-mm-device-do-normalize" not in arguments
    assert "--skip-tokenizer-init" in arguments


def test_a_server_that_prepares_images_is_refused(call_adapter, recorded):
    answers = copy.deepcopy(recorded)
    answers["/server_info"]["vllm_config"]["model_config"]["multimodal_config"] = SERVED
    identity, _ = call_adapter(answers, lambda adapter, connection: adapter.identify(connection))
    assert not identity.reports_spans, "requests end before an update"
    for changes in {"mm_device_do_normalize": True}, {"mm_processor_cache_gb": 4.0}:
        answers["/server_info"]["vllm_config"]["model_config"]["multimodal_config"] = SERVED | changes
        with pytest.raises(ServerRefusedError, match="--no-mm-device-do-normalize --mm-processor-cache-gb 0"):
            call_adapter(answers, lambda adapter, connection: adapter.identify(connection))


def test_patches_and_positions_are_those_of_the_trainer(generated, images, folder):
    _, (body,) = generated()
    assert body["token_ids"] == [*IDS[:-1], 0], "the policy's own image token is padding"
    features = body["features"]
    assert features["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}, {"offset": 8, "length": 8}]}
    assert len(set(features["mm_hashes"]["image"])) == 2
    batch = ImageReader(str(folder)).read([b64decode(image) for image in images])
    patches = torch.split(batch.pixels.bfloat16(), batch.grid.prod(-1).tolist())
    for data, pixels, grid in zip(features["kwargs_data"]["image"], patches, batch.grid, strict=True):
        item = msgpack.unpackb(b64decode(data))
        dtype, shape, (_, raw) = item["pixel_values"]["data"]
        actual = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
        assert torch.equal(actual, pixels)
        assert item["pixel_values"]["field"][0] == "flat"
        assert list(torch.frombuffer(bytearray(item["image_grid_thw"]["data"][2].data), dtype=torch.int64)) == list(
            grid
        )


def test_a_request_without_images_has_no_features(generated):
    _, (body,) = generated([6, IMAGE, VIDEO, 9], ())
    assert "features" not in body
    assert body["token_ids"] == [6, 0, 0, 9]
    assert body["sampling_params"]["stop_token_ids"] == [IMAGE, VIDEO]


def test_images_that_do_not_fit_the_prompt_are_refused(generated, images):
    with pytest.raises(ValueError, match=r"needs image tokens in runs of \[8\], but has runs of \[4\]"):
        generated([6, *[IMAGE] * 4, 9], images[1:])
    with pytest.raises(ValueError, match="image 1 of 1 cannot be read"):
        generated([6, *[IMAGE] * 4, 9], (b64encode(b"no image").decode(),))


def test_generation_continues_after_a_video_token_of_the_policy(generated, recorded):
    answers = copy.deepcopy(recorded)
    choice = answers[GENERATE]["events"][-1]["choices"][0]
    choice["token_ids"][-1], choice["finish_reason"] = VIDEO, "stop"
    assert generated(answers=answers)[0][-1].finish == "abort"
    assert generated(answers=answers, stop_token_ids=(VIDEO,))[0][-1].finish == "stop"
    with pytest.raises(ValueError, match="stop texts and penalties"):
        generated(answers=answers, frequency_penalty=0.5)


@pytest.mark.parametrize("mode", ["recompute", "keep_cache"])
def test_an_update_resets_the_embeddings_of_images(call_adapter, mode, tmp_path):
    paths = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    answers = {**{path: {} for path in paths}, "/reset_prefix_cache": {"success": True}}
    with pytest.raises(Exception, match="/reset_encoder_cache was refused"):
        call_adapter(answers, lambda adapter, connection: adapter.load(connection, tmp_path, "3", mode))
    call_adapter(
        answers | {"/reset_encoder_cache": {}},
        lambda adapter, connection: adapter.load(connection, tmp_path, "3", mode),
    )


def test_an_adapter_rank_is_refused_for_a_vlm(folder):
    with pytest.raises(RunError, match="servers of a VLM cannot load LoRA adapters"):
        VLLMAdapter(VLLMConfig(adapter_rank=8)).serve(ModelReference(str(folder)))
