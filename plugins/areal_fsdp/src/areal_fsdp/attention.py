"""Packed attention for Hugging Face models, through transformers' attention interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface

from areal_core.data.attention import PackedLayout, packed_attention
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

PACKED = "areal_packed"
"""The name under which models find this attention."""

_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")


def _hugging_face_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """What a model calls in each layer. Tensors are [1, heads, T, head size]; the layout is handed down by keyword.

    Dropout is not applied: log-probabilities must be those of the policy that sampled.
    """
    _refuse_what_is_not_computed(module, packed_layout, extras)
    assert packed_layout is not None
    attended = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packed_layout,
        scale=scaling,
        window=sliding_window,
    )
    return attended.unsqueeze(0), None


def _refuse_what_is_not_computed(
    module: torch.nn.Module, layout: PackedLayout | None, extras: Mapping[str, Any]
) -> None:
    """Raise RunError rather than leave out something that the model's attention asks for."""
    kind = type(module).__name__
    if layout is None:
        raise RunError(
            f"{kind} does not hand the batch's layout on to attention, so sequences cannot be packed",
            hints=["the engine needs a model whose layers pass keyword arguments down to transformers' interface"],
        )
    asked = [name for name in _NOT_COMPUTED if extras.get(name) is not None]
    if asked:
        raise RunError(f"{kind} asks its attention for {', '.join(asked)}, which packed attention does not compute")
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RunError(f"{kind} is not causal: this engine trains causal language models")


def register_packed_attention() -> None:
    """Make the name `PACKED` known to transformers; safe to call again."""
    AttentionInterface.register(PACKED, _hugging_face_attention)
