"""Checks of a model's requests to attention: features whose absence a comparison on a short probe does not show.

Packed attention computes two masks: causal, and causal with a window. A model may ask for another mask, such as chunks.
So the probe runs under `CHECKED`: transformers passes each layer the function that makes its mask, and the check
compares this function with packed attention's masks at distances of up to 262,144 tokens.

transformers' own `sdpa` ignores soft caps and sinks; `checked_sdpa` raises instead. It keeps the name `sdpa`, because
some models compute other things for a name that they do not know.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from areal_core.errors import RunError
from areal_core.models import ShownMask, probe_positions, shown_mask
from areal_fsdp.attention.hugging_face import BOUNDARIES, packed_attention_of_a_layer

if TYPE_CHECKING:
    from collections.abc import Iterator

SDPA = "sdpa"
CHECKED = "areal_checked"
"""Name of packed attention that refuses masks it does not compute; for a single sequence."""

_HARMLESS = (*BOUNDARIES, "position_ids", "cache_position", "input_ids", "token_type_ids", "mm_token_type_ids")
"""Tensors that models pass to every attention, and that do not change its result."""
_KNOWN = (*_HARMLESS, "softcap", "s_aux", "position_bias")
"""Tensors that packed attention either computes with or refuses."""
_LEFT_OUT_BY_SDPA = ("softcap", "s_aux")


@contextmanager
def checked_sdpa() -> Iterator[None]:
    """Make transformers' `sdpa` raise RunError inside this context if a layer asks for a feature that it ignores."""

    def attention(module: torch.nn.Module, *inputs: Any, **extras: Any) -> tuple[torch.Tensor, None]:
        if asked := [name for name in _LEFT_OUT_BY_SDPA if extras.get(name) is not None]:
            raise RunError(f"{type(module).__name__} asks its attention for {', '.join(asked)}, which sdpa leaves out")
        return sdpa_attention_forward(module, *inputs, **extras)

    AttentionInterface.register(SDPA, attention)
    try:
        yield
    finally:
        AttentionInterface.register(SDPA, sdpa_attention_forward)


def _checked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    visible = getattr(attention_mask, "visible", None)
    if asked := [name for name, extra in extras.items() if torch.is_tensor(extra) and name not in _KNOWN]:
        raise RunError(
            f"{type(module).__name__} gives its attention {', '.join(asked)}, which packed attention ignores"
        )
    if isinstance(attention_mask, ShownMask) and visible is not None:
        _refuse_other_masks(module, attention_mask, sliding_window)
        attention_mask = None
    return packed_attention_of_a_layer(
        module, query, key, value, attention_mask, sliding_window=sliding_window, **extras
    )


def _refuse_other_masks(module: torch.nn.Module, mask: ShownMask, window: int | None) -> None:
    """Raise RunError if a layer's mask differs from the mask that packed attention computes."""
    queries, keys = probe_positions(mask.near, window, device=mask.device)
    visible = mask.visible(0, 0, queries, keys)
    is_earlier = keys <= queries
    computed = is_earlier if window is None else is_earlier & (queries - keys < window)
    if bool((visible & ~is_earlier).any()):
        raise RunError(f"{type(module).__name__} lets tokens see later ones: this engine trains causal language models")
    if bool((visible != computed).any()):
        size = f" of {mask.near} tokens" if mask.near else ""
        raise RunError(f"{type(module).__name__} asks for a mask{size} that packed attention does not compute")


def register_checked_attention() -> None:
    """Register `CHECKED` with transformers; safe to call again."""
    AttentionInterface.register(CHECKED, _checked_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(CHECKED, shown_mask)
