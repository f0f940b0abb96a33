"""Sizes of the keys and values that servers keep, derived by hand from published configs."""

from __future__ import annotations

from typing import Any

import pytest

from areal_core.errors import RunError
from areal_core.models.sizes import cached_numbers, has_recurrent_states

QWEN3: dict[str, Any] = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
}
QWEN25 = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
DEEPSEEK = {"num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("description", "tensor_parallel", "expected"),
    [
        (QWEN3, 1, 2 * 28 * 8 * 128),
        (QWEN3, 4, 2 * 28 * 2 * 128),
        (QWEN25, 1, 2 * 24 * 2 * 64),
        (QWEN25, 4, 2 * 24 * 1 * 64),  # a GPU keeps at least one head of keys
        (GPT2, 1, 2 * 12 * 12 * 64),
        (DEEPSEEK, 1, 27 * 576),
        (DEEPSEEK, 4, 27 * 576),  # latent vectors are on every GPU
        ({**DEEPSEEK, "index_head_dim": 128}, 1, 27 * 704),
        ({"text_config": QWEN3}, 2, 2 * 28 * 4 * 128),
        ({**QWEN3, "global_head_dim": 256}, 1, 2 * 28 * 8 * 256),
    ],
)
def test_keys_and_values_of_a_token(description: dict[str, Any], tensor_parallel: int, expected: int) -> None:
    assert cached_numbers(description, tensor_parallel) == expected


@pytest.mark.parametrize(
    "description", [{}, {"llm_config": QWEN3}, {**QWEN3, "num_attention_heads": 0}, {"num_hidden_layers": 2}]
)
def test_a_config_without_the_sizes_is_refused(description: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="does not say how large keys and values are"):
        cached_numbers(description)


def test_models_with_recurrent_states_are_known() -> None:
    assert not any(map(has_recurrent_states, (QWEN3, GPT2, DEEPSEEK, {**QWEN3, "layer_types": ["sliding_attention"]})))
    assert has_recurrent_states({"text_config": {**QWEN3, "layer_types": ["full_attention", "linear_attention"]}})
    assert has_recurrent_states({**QWEN3, "mamba_d_state": 16})
