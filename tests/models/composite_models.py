"""Tiny composite models: a language model with a config of its own, a vision tower, and tensors that their class leaves
in the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

if TYPE_CHECKING:
    from pathlib import Path

_TEXT = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_5": {
        "text_config": {**_TEXT, **_DELTA},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        "image_token_id": 58,
        "video_token_id": 59,
        "vision_start_token_id": 57,
        "vision_end_token_id": 56,
    },
    "gemma3": {
        "text_config": {**_TEXT, **_SLIDING, "query_pre_attn_scalar": 8},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": 58,
        "boi_token_index": 57,
        "eoi_token_index": 56,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            **_SLIDING,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 62,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {**_TOWER, "head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2},
        "audio_config": None,
        "image_token_id": 58,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "tie_word_embeddings": True},
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 58,
        "tie_word_embeddings": True,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "vision_config": {
            **_TOWER,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 58,
    },
}


def make_model(family: str, folder: Path) -> None:
    """Write a random model, with weights of multi-token prediction that its class leaves unread."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.randn(3, 5).bfloat16()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
