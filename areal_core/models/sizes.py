"""Sizes that a model's config.json says: layers, heads, and what a server keeps of each token. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_WIDTHS: Final = ("hidden_size", "n_embd", "d_model")
_CONTEXTS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length")
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention", "attention", "compressed_attention"}
_RECURRENT: Final = ("mamba_", "ssm_", "linear_num_", "linear_attn", "conv_L_cache", "lru_width")
"""First letters of config keys of models whose layers keep a state of fixed size for each sequence."""


def text_config(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model: `text_config` of a composite one.

    Example:
        >>> from areal_core.models import text_config
        >>> text_config({"model_type": "qwen2_vl", "text_config": {"num_hidden_layers": 28}})["num_hidden_layers"]
        28
        >>> text_config({"model_type": "qwen2", "num_hidden_layers": 24})["num_hidden_layers"]
        24
    """
    part: Mapping[str, Any] = description.get("text_config") or description
    return part


def first_size(values: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of these sizes that a config has; 0 for none."""
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def context_length(description: Mapping[str, Any]) -> int:
    """Return the longest sequence of a model in tokens; 0 if its config.json does not say."""
    return first_size(text_config(description), _CONTEXTS)


def cached_numbers(description: Mapping[str, Any], tensor_parallel: int = 1) -> int:
    """Return how many numbers one GPU of a server keeps of one token: keys and values of all layers.

    Layers with windows, and layers without attention, keep less for each token. Multi-head latent attention keeps one
    compressed vector and one rotary key on every GPU (DeepSeek-V2, arXiv 2405.04434, section 2.1). Each GPU keeps at
    least one head of keys.

    Args:
        description: the model's config.json.
        tensor_parallel: GPUs that share the heads.

    Raises:
        RunError: the config lacks a size.

    Example:
        >>> cached_numbers({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64})
        256
    """
    text = text_config(description)
    layers, heads = first_size(text, LAYERS), first_size(text, HEADS)
    indexer = first_size(text, ("index_head_dim",))
    if latent := first_size(text, ("kv_lora_rank",)):
        numbers = layers * (latent + first_size(text, ("qk_rope_head_dim",)) + indexer)
    else:
        width = max(first_size(text, ("head_dim",)), first_size(text, ("global_head_dim",)))
        width = width or first_size(text, _WIDTHS) // max(1, heads)
        keys = max(1, (first_size(text, ("num_key_value_heads",)) or heads) // tensor_parallel)
        numbers = layers * (2 * keys * width + indexer) if heads else 0
    if not numbers:
        raise RunError(
            f"config.json of model type '{description.get('model_type')}' does not say how large keys and values are"
        )
    return numbers


def has_recurrent_states(description: Mapping[str, Any]) -> bool:
    """Return whether layers of a model keep a recurrent state for each sequence, as Mamba and linear attention do.

    Args:
        description: the model's config.json.

    Example:
        >>> from areal_core.models import has_recurrent_states
        >>> has_recurrent_states({"layer_types": ["linear_attention", "full_attention"]})
        True
        >>> has_recurrent_states({"model_type": "llama", "num_hidden_layers": 16})
        False
    """
    text = text_config(description)
    kinds = {kind for kind in text.get("layer_types") or () if isinstance(kind, str)}
    return bool(kinds - _ATTENTION) or any(key.startswith(_RECURRENT) for key in text)
