"""Prompts with images, as servers are asked for them."""

import json
from dataclasses import replace

import pytest

from areal_core.models.images import ImagePrompts
from areal_core.servers import GenerationRequest, SamplingParameters

IMAGE, VIDEO, PAD = 2, 5, 7
SEEING = {
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "text_config": {"pad_token_id": PAD},
    "vision_config": {},
}


@pytest.fixture
def prompts_of(tmp_path):
    def make(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ImagePrompts(str(tmp_path))

    return make


def test_images_are_the_first_runs_and_what_a_policy_wrote_is_padding(prompts_of):
    ids = [9, IMAGE, IMAGE, IMAGE, 4, IMAGE, 4, IMAGE, IMAGE, VIDEO, 8]
    placed = prompts_of(SEEING).place(ids, 2)
    assert placed.places == [(1, 3), (5, 1)]
    assert placed.input_ids == [9, IMAGE, IMAGE, IMAGE, 4, IMAGE, 4, PAD, PAD, PAD, 8]
    assert prompts_of(SEEING).place(ids, 0).input_ids == [9, PAD, PAD, PAD, 4, PAD, 4, PAD, PAD, PAD, 8]


def test_a_sequence_may_begin_with_an_image_and_not_end_with_one(prompts_of):
    prompts = prompts_of(SEEING)
    assert prompts.place([IMAGE, IMAGE, 4], 1).places == [(0, 2)]
    for ids, count in ([9, IMAGE, IMAGE], 1), ([9, IMAGE, IMAGE, 4], 2), ([9, 4], 1):
        with pytest.raises(ValueError, match=rf"has {count} images, and its {len(ids)} tokens have . runs"):
            prompts.place(ids, count)


def test_generation_stops_at_image_and_video_tokens_and_goes_on(prompts_of):
    prompts = prompts_of(SEEING)
    assert prompts.stops([1, VIDEO]) == [1, VIDEO, IMAGE]
    assert prompts.is_written([8, IMAGE], [1], is_resumable=True)
    assert prompts.is_written([VIDEO], [1], is_resumable=True)
    assert not prompts.is_written([8, IMAGE], [IMAGE], is_resumable=False), "the request stops there itself"
    assert not prompts.is_written([IMAGE, 8], [], is_resumable=False)
    assert not prompts.is_written([], [], is_resumable=False)
    with pytest.raises(ValueError, match=r"the policy wrote token 2.*stop texts and penalties"):
        prompts.is_written([8, IMAGE], [1], is_resumable=False)


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen3"}, {**SEEING, "model_type": "llava"}, {**SEEING, "image_token_id": None}, None]
)
def test_a_model_that_sees_nothing_is_asked_as_ever(prompts_of, config):
    prompts = ImagePrompts("no/such/folder") if config is None else prompts_of(config)
    assert not prompts.sees
    assert prompts.place([9, IMAGE, VIDEO], 0) == ([9, IMAGE, VIDEO], [])
    assert prompts.stops([1]) == [1]
    assert not prompts.is_written([IMAGE], [], is_resumable=False)
    with pytest.raises(ValueError, match=r"a request has images, and .* sees none.*qwen3_vl"):
        prompts.place([9, IMAGE, 4], 1)


def test_a_config_without_a_language_model_of_its_own_is_read_too(prompts_of):
    flat = {"model_type": "qwen2_vl", "image_token_id": IMAGE, "pad_token_id": None, "vision_config": {}}
    assert prompts_of(flat).place([VIDEO, IMAGE, 4], 0).input_ids == [VIDEO, 0, 4]


def test_log_probabilities_of_a_prompt_with_images_are_refused():
    request = GenerationRequest("r1", [IMAGE, 4], SamplingParameters(prompt_logprobs=True), 0, images=("iVBORw0KGgo=",))
    with pytest.raises(ValueError, match="request r1 has images and prompt_logprobs"):
        request.check(vocabulary=10, limit=1000, limited_by="the servers take")
    replace(request, images=()).check(vocabulary=10, limit=1000, limited_by="the servers take")
