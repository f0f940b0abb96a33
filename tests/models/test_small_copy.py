"""Small random copies of large models, by which `areal doctor MODEL` tries what is too large or not here."""

import pytest
import transformers
from transformers import AutoConfig, Lfm2MoeConfig

from areal_core.errors import RunError
from areal_core.models.small_copy import NotTriedError, small_copy_of, try_dtypes

LFM2 = ["conv", "conv", "full_attention", "conv"]
LARGE = {
    "falcon_h1": {"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64},
    "zamba2": {},
    "lfm2_moe": {"layer_types": LFM2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "qwen3_5": {},
    "gemma3": {},
    "mistral3": {},
    "llama4": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LARGE)
def test_a_copy_has_the_parts_of_the_model(family, tmp_path):
    config = transformers.CONFIG_MAPPING[family](**LARGE[family])
    config.save_pretrained(tmp_path)
    with small_copy_of(tmp_path) as (folder, how):
        copy = AutoConfig.from_pretrained(folder)
        assert list(folder.glob("*.safetensors"))
    assert how.startswith("tried on a random copy of ")
    assert type(copy) is type(config)
    assert hasattr(copy, "vision_config") == hasattr(config, "vision_config")
    kinds = [set(getattr(each.get_text_config(), "layer_types", None) or ()) for each in (config, copy)]
    assert kinds[0] == kinds[1]


def test_what_no_copy_computes_is_not_tried(tmp_path):
    Lfm2MoeConfig().save_pretrained(tmp_path)
    with pytest.raises(NotTriedError, match="no small copy of model type 'lfm2_moe' computes"):
        try_dtypes(tmp_path, lambda path, dtype: (True, "packed"))


def test_an_answer_names_its_dtypes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0")
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert try_dtypes(tmp_path, lambda path, dtype: (True, "packed")) == (True, "in float32 and bfloat16: packed")

    def refuse_half(path, dtype):
        if dtype == "bfloat16":
            raise RunError("it rounds", hints=["take float32"])
        return True, "rows"

    words = "in float32: rows; in bfloat16: refused: it rounds; take float32"
    assert try_dtypes(tmp_path, refuse_half) == (True, words)
