"""Attention masks of transformers that keep the function they are made from. With them, a probe of a few tokens shows
windows of thousands of tokens.

Register `shown_mask` under the name of an attention in transformers' `ALL_MASK_ATTENTION_FUNCTIONS`. That attention
then gets such masks, and can compare their functions at `probe_positions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FARTHEST = 1 << 18
"""Distance in tokens up to which masks are compared."""


class ShownMask(torch.Tensor):
    """A mask of zeros with the function that it stands for. A tensor that a layer derives from it has no function.

    Attributes:
        visible: returns whether a query sees a key, from (batch, head, query, key), tensors that broadcast.
        near: size of a window or chunk in tokens; None for none.

    Example:
        >>> from areal_core.models import ShownMask, probe_positions, shown_mask
        >>> def window(batch, head, query, key):
        ...     return (key <= query) & (query - key < 1000)
        >>> mask = shown_mask(1, 1, 1, mask_function=window, local_size=1000)  # one token shows the whole window
        >>> queries, keys = probe_positions(mask.near, device=mask.device)
        >>> int((queries - keys)[mask.visible(0, 0, queries, keys)].max())
        999
        >>> isinstance(mask, ShownMask), hasattr(mask[..., :1], "visible")
        (True, False)
    """

    visible: Callable[..., torch.Tensor]
    near: int | None


def shown_mask(
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
    """Return a `ShownMask` [batch, 1, queries, keys]. The parameters are the keyword arguments of transformers."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device).as_subclass(ShownMask)
    mask.visible, mask.near = mask_function, local_size
    return mask


def probe_positions(*sizes: int | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions at which masks may differ: around powers of 2, and around multiples of sizes.

    Args:
        sizes: sizes of windows and chunks, in tokens; None and 0 stand for none.
        device: device of the returned tensors.

    Returns:
        Queries [N, 1] and keys [1, N], int64.
    """
    edges = {0, *(2**power for power in range(_FARTHEST.bit_length()))}
    edges |= {size * number for size in sizes if size for number in (1, 2, 3)}
    places = torch.tensor(sorted({edge + step for edge in edges for step in (-1, 0, 1) if edge + step >= 0}))
    places = places.to(device)
    return places[:, None], places[None, :]
