"""Images in generation: the embedded engine, in a process of its own, against the trainer's model."""

import asyncio
import json
import shutil
from base64 import b64encode

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3_5Config
from vision_rank_program import make_engine

from areal_core.data import PackedBatch, TrajectoryBuilder, shift_to_predictions
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig
from areal_vision.images import ImageReader

pytestmark = pytest.mark.slow
WAIT_S = 240


@pytest.fixture(scope="module")
def hybrid(folder, tmp_path_factory):
    """A tiny Qwen3.5, which has a recurrent state beside what it sees, with the files of the other model."""
    made = tmp_path_factory.mktemp("hybrid")
    shutil.copytree(folder, made, dirs_exist_ok=True)
    towers = json.loads((folder / "config.json").read_text())
    text = towers["text_config"] | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    text |= {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = towers["vision_config"] | {"model_type": "qwen3_5_vision"}
    vision.pop("deepstack_visual_indexes", None)
    places = {name: towers[name] for name in towers if name.endswith("_token_id")}
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=text, vision_config=vision, **places))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def asked(folder, image):
    """Prompts with one, two and no images, and the same question about two different ones."""
    reader, found = ImageReader(str(folder)), []
    for colors in ([(250, 0, 0)], [(0, 250, 0)], [(0, 0, 250), (250, 250, 0)], []):
        files = [image(color) for color in colors]
        seen, ids = reader.read(files), [6, 20]
        for count in reader.counts(seen.grid):
            ids += [3, *[2] * count, 4]
        found.append(([*ids, 30, 9], files, seen))
    return found


@pytest.fixture
def fixture_named(request):
    return request.getfixturevalue


def request(name, ids, files, **sampling):
    images = tuple(b64encode(file).decode() for file in files)
    return GenerationRequest(name, ids, SamplingParameters(max_new_tokens=12, **sampling), 7, images=images)


@pytest.mark.parametrize(
    ("model", "mode"), [("folder", "keep_cache"), ("folder", "recompute"), ("hybrid", "recompute")]
)
def test_log_probabilities_are_those_of_the_trainer(fixture_named, asked, model, mode, tmp_path):
    """Siblings in one batch, image tokens that the policy has written, and weights that change in between."""
    folder = fixture_named(model)
    trainer = make_engine(folder)

    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", max_concurrent_requests=5, update_mode=mode)), tmp_path)
        try:
            await engine.start(ModelReference(str(folder)))
            asking = [
                asyncio.ensure_future(engine.generate(request(f"{row}-{again}", ids, files, temperature=1.5)))
                for row, (ids, files, _) in enumerate(asked)
                for again in range(3)
            ]
            await asking[0]
            await engine.update_weights(WeightUpdate(1, folder))
            return [await each for each in asking]
        finally:
            await engine.close()

    made = asyncio.run(asyncio.wait_for(work(), WAIT_S))
    trajectories = []
    for place, generation in enumerate(made):
        ids, _, seen = asked[place // 3]
        builder = TrajectoryBuilder()
        builder.add_context(ids)
        builder.add_generation(generation)
        multimodal = {"patches": {"pixels": seen.pixels}, "images": {"grid": seen.grid}}
        trajectories.append(builder.build(multimodal=multimodal))
    batch = shift_to_predictions(PackedBatch.from_trajectories(trajectories))
    trainer._module.temperature = 1.5
    found = trainer.forward(batch, ["logprobs"])["logprobs"]
    trainer.close()
    mask = batch["loss_mask"]
    assert torch.allclose(found[mask], batch["logprobs"][mask], atol=2e-4)
    assert {version for generation in made for version in generation.versions} == {0, 1}
    first, second = made[0], made[3]
    assert first.logprobs[0] != second.logprobs[0], "the same question about another image"


def test_images_that_do_not_fit_cost_their_request_and_nothing_else(folder, asked, tmp_path):
    ids, files, _ = asked[0]

    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", max_concurrent_requests=4)), tmp_path)
        told = []
        try:
            await engine.start(ModelReference(str(folder)))
            for wrong, shown in (
                ([6, 20, 9], files),
                (ids, [b"no image"]),
                ([6, 3, 2, 2, 2, 2], files),
            ):
                with pytest.raises(ValueError, match=r".") as caught:
                    await engine.generate(request("wrong", wrong, shown))
                told.append(str(caught.value))
            return told, await engine.generate(request("right", ids, files))
        finally:
            await engine.close()

    told, right = asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert "need image tokens in runs of [4], but the sequence has runs of []" in told[0]
    assert "image 1 of 1 cannot be read" in told[1]
    assert "ends with an image" in told[2]
    assert 1 <= len(right.output_ids) <= 12


def test_a_model_of_text_takes_no_images(asked, tmp_path):
    from areal_grpo.demonstration.model import make_model

    ids, files, _ = asked[0]

    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu")), tmp_path)
        try:
            await engine.start(ModelReference(str(make_model(tmp_path / "text"))))
            await engine.generate(request("seen", ids, files))
        finally:
            await engine.close()

    with pytest.raises(ValueError, match="has no image processor"):
        asyncio.run(asyncio.wait_for(work(), WAIT_S))
