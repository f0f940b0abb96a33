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
from areal_fsdp.attention.hugging_face import packed_attention_of_a_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SDPA = "sdpa"
CHECKED = "areal_checked"
"""Packed attention of one sequence, which refuses masks that it does not compute."""

_FARTHEST = 1 << 18
_HARMLESS = ("position_ids", "cache_position", "input_ids", "token_type_ids", "mm_token_type_ids")
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


class _Mask(torch.Tensor):
    """A mask of zeros that knows the function it stands for, unless a layer makes another tensor of it."""

    visible: Callable[..., torch.Tensor]
    near: int | None


def _checked_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device).as_subclass(_Mask)
    mask.visible, mask.near = mask_function, local_size
    return mask


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
    if isinstance(attention_mask, _Mask) and visible is not None:
        _refuse_other_masks(module, attention_mask, sliding_window)
        attention_mask = None
    return packed_attention_of_a_layer(
        module, query, key, value, attention_mask, sliding_window=sliding_window, **extras
    )


def _refuse_other_masks(module: torch.nn.Module, mask: _Mask, window: int | None) -> None:
    """Compare at the places where masks of these kinds differ: around powers of 2, and multiples of a local size."""
    edges = {0, *(2**power for power in range(_FARTHEST.bit_length()))}
    sizes = {size for size in (mask.near, window) if size}
    edges |= {size * number for size in sizes for number in (1, 2, 3)}
    places = torch.tensor(sorted({edge + step for edge in edges for step in (-1, 0, 1) if edge + step >= 0}))
    places = places.to(mask.device)
    queries, keys = places[:, None], places[None, :]
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
    ALL_MASK_ATTENTION_FUNCTIONS.register(CHECKED, _checked_mask)
