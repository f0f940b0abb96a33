"""Tiny models of each family that sees, of which every tensor is seen in the output."""

from __future__ import annotations

import torch

from areal_vision.tiny_model import HIDDEN, PATCH, PLACES, SPECIAL, make_model

TEXT = {
    "vocab_size": 35,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TOWER = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIDES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": PATCH}
"""Pixels of a patch's side: SGLang knows no other patches of Qwen2.5-VL than its own."""


def make_family(folder, family, *, seed=0):
    """A model of a family as a Hugging Face folder, with tokenizer and image processor."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_model(folder, seed=seed, head_size=32)  # the smallest heads that vLLM serves on a CPU
    side = SIDES[family]
    places = {f"{name}_token_id": SPECIAL.index(token) for name, token in PLACES.items()}
    torch.manual_seed(seed)
    if family == "qwen3_vl":
        model = AutoModelForImageTextToText.from_pretrained(folder)
    elif family == "qwen2_vl":
        tower = {**TOWER, "patch_size": side, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2, "in_chans": 3}
        config = Qwen2VLConfig(text_config=TEXT, vision_config=tower, tie_word_embeddings=False, **places)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        # Windows of two by two merged patches: an image of four by two has two of them.
        tower = {**TOWER, "patch_size": side, "hidden_size": 32, "out_hidden_size": HIDDEN, "intermediate_size": 64}
        tower |= {"window_size": 4 * side, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=tower, tie_word_embeddings=True, **places)
        model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.dim() > 1 else 0.3
            parameter.add_(spread * torch.randn(parameter.shape))
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / file).unlink()
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=side, merge_size=2, temporal_patch_size=2, min_pixels=16 * side**2, max_pixels=64 * side**2
    ).save_pretrained(folder)
    return folder
