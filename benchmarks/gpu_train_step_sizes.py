"""The models of `gpu_train_step.py`."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen3MoeConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
SHAPES = {
    "tiny": (199, 64, 96, 2, 4, 2),
    "small": (1999, 256, 512, 4, 4, 2),
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


def head_size(config: Any) -> int:
    """Of attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def make_config(size: str, *, tiny: bool) -> Any:
    """Of a name of `SHAPES` or `MOES`, or, `tiny`, of something like it for a CPU."""
    if size in MOES:
        return Qwen3MoeConfig(**MOES[size] | (_TINY_MOE if tiny else {}), max_position_embeddings=32768)
    sizes = dict(zip(SIZES, SHAPES["tiny" if tiny else size], strict=True))
    return Qwen2Config(**sizes, max_position_embeddings=32768, tie_word_embeddings=size != "7b")
