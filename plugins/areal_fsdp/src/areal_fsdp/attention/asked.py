"""What a model asks of its attention, which an attention that leaves it out does not show on a short probe.

Packed attention knows two masks: causal, and causal with a window. A model may ask for another one, such as chunks. So
the probe runs under `CHECKED`: there transformers hands each layer the function that its mask is made from, which is
compared with packed attention's at distances of up to 262,144 tokens.

transformers' own `sdpa` leaves out soft caps and sinks; see `checked_sdpa`. The name stays `sdpa`: some models compute
other things for a name that they do not know.
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
"""Packed attention of one sequence, which refuses masks that it does not compute."""

_HARMLESS = (*BOUNDARIES, "position_ids", "cache_position", "input_ids", "token_type_ids", "mm_token_type_ids")
"""Tensors that models hand down to every attention, and that change nothing in it."""
_KNOWN = (*_HARMLESS, "softcap", "s_aux", "position_bias")
"""Tensors that packed attention expects: it computes with them or refuses them."""
_LEFT_OUT_BY_SDPA = ("softcap", "s_aux")


@contextmanager
def checked_sdpa() -> Iterator[None]:
    """Let transformers' `sdpa` raise RunError where a layer asks it for what it leaves out."""

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
    """Raise RunError where a layer's mask is another one than packed attention computes."""
    queries, keys = probe_positions(mask.near, window, device=mask.device)
    found = mask.visible(0, 0, queries, keys) & (keys <= queries)
    wanted = keys <= queries
    if window is not None:
        wanted = wanted & (queries - keys < window)
    if bool((mask.visible(0, 0, queries, keys) != found).any()):
        raise RunError(f"{type(module).__name__} lets tokens see later ones: this engine trains causal language models")
    if bool((found != wanted).any()):
        size = f" of {mask.near} tokens" if mask.near else ""
        raise RunError(f"{type(module).__name__} asks for a mask{size} that packed attention does not compute")


def register_checked_attention() -> None:
    """Make the name `CHECKED` known to transformers; safe to call again."""
    AttentionInterface.register(CHECKED, _checked_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(CHECKED, shown_mask)
