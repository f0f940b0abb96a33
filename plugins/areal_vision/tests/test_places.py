"""Where images stand among tokens, against transformers' own."""

import pytest
import torch

from areal_core.errors import RunError
from areal_core.models.images import without_image_tokens
from areal_vision.places import VisionTokens

IMAGE, TEXT = 2, 20


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder)


def sequence(*runs):
    return torch.cat([torch.full((count,), token) for token, count in runs])


def test_positions_are_those_of_transformers(model):
    ids, grid = sequence((TEXT, 3), (IMAGE, 8), (TEXT, 2), (IMAGE, 4), (TEXT, 5)), torch.tensor([[1, 4, 8], [1, 4, 4]])
    placed = VisionTokens(model).place(ids, grid)
    kinds = (ids == IMAGE).int()
    wanted, offset = model.model.get_rope_index(ids[None], kinds[None], image_grid_thw=grid)
    assert torch.equal(placed.positions, wanted[:, 0])
    assert placed.offset == int(offset)
    assert torch.equal(placed.input_ids, ids)
    assert placed.offset < 0, "an image takes fewer positions than tokens"


def test_image_tokens_that_a_policy_wrote_are_padding(model):
    ids, grid = sequence((TEXT, 2), (IMAGE, 4), (TEXT, 1), (IMAGE, 2)), torch.tensor([[1, 4, 4]])
    tokens = VisionTokens(model)
    placed = tokens.place(ids, grid)
    assert placed.input_ids.tolist() == [TEXT] * 2 + [IMAGE] * 4 + [TEXT] + [0] * 2
    assert without_image_tokens(model.config, torch.tensor([IMAGE, TEXT])).tolist() == [0, TEXT]
    assert tokens.place(ids, grid[:0]).positions.tolist() == [list(range(9))] * 3


@pytest.mark.parametrize(
    "runs",
    [
        [(TEXT, 2), (IMAGE, 3), (TEXT, 1)],
        [(TEXT, 1), (IMAGE, 8), (TEXT, 1)],
        [(TEXT, 3)],
        [(IMAGE, 3), (TEXT, 1), (IMAGE, 5)],
    ],
)
def test_images_that_do_not_fit_their_tokens_are_refused(model, runs):
    with pytest.raises(ValueError, match=r"need image tokens in runs of \[4, 4\]"):
        VisionTokens(model).place(sequence(*runs), torch.tensor([[1, 4, 4], [1, 4, 4]]))


def test_models_that_see_in_another_way_are_refused():
    from transformers import AutoModelForImageTextToText, LlavaConfig

    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 40,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 8,
            "patch_size": 4,
        },
        image_token_index=3,
    )
    with pytest.raises(RunError, match="vision-language model that areal does not support"):
        VisionTokens(AutoModelForImageTextToText.from_config(config))
