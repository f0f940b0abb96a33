"""The models of `gpu_train_step.py`."""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3MoeConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
SHAPES = {
    "tiny": (199, 64, 96, 2, 4, 2),
    "small": (1999, 256, 512, 4, 4, 2),
    "0.5b": (151936, 896, 4864, 24, 14, 2),
    "1.5b": (151936, 1536, 8960, 28, 12, 2),
    "7b": (152064, 3584, 18944, 28, 28, 4),
}
"""Of Qwen2's models, and of what a CPU is enough for."""
MOES: dict[str, dict[str, Any]] = {
    "30b-a3b-slice": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip
_TINY_MOE = {
    "vocab_size": 199, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-2b": {
        "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Three of four layers are gated delta rules, the fourth has attention."""
_TINY_HYBRID = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SINKS: dict[str, dict[str, Any]] = {
    "gpt-oss-slice": {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The widths of gpt-oss-20b, and four of its 24 layers: attention sinks, and a window in every second layer."""
_TINY_SINKS = {
    "vocab_size": 199, "hidden_size": 128, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 32,
}  # fmt: skip


def head_size(config: Any) -> int:
    """Of attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def make_config(size: str, *, tiny: bool) -> Any:
    """Of a name of `SHAPES`, `MOES`, `HYBRIDS` or `SINKS`, or, `tiny`, of something like it for a CPU."""
    if size in HYBRIDS:
        return Qwen3_5TextConfig(**HYBRIDS[size] | (_TINY_HYBRID if tiny else {}), max_position_embeddings=32768)
    if size in SINKS:
        return GptOssConfig(**SINKS[size] | (_TINY_SINKS if tiny else {}), max_position_embeddings=32768)
    if size in MOES:
        return Qwen3MoeConfig(**MOES[size] | (_TINY_MOE if tiny else {}), max_position_embeddings=32768)
    sizes = dict(zip(SIZES, SHAPES["tiny" if tiny else size], strict=True))
    return Qwen2Config(**sizes, max_position_embeddings=32768, tie_word_embeddings=size != "7b")
