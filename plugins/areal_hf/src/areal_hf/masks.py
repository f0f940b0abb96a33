"""Which cached columns each token may look at, for models with full attention and with sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

Masks = torch.Tensor | dict[str, torch.Tensor] | None
"""What a model takes as `attention_mask`: one mask, or one for each type of layer, or none for plain causality."""

_KNOWN = {"full_attention", "sliding_attention"}


class AttentionMasks:
    """Builds additive masks: 0 where a token may look, the dtype's lowest number elsewhere.

    Args:
        config: of the model; says which layers see only a window.
        dtype: of the mask, that of the attention scores.
        explicit: whether the attention in use needs the causal mask of a prompt spelt out.

    Raises:
        ValueError: the model has layers that are no attention over all earlier tokens or a window of them.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, *, explicit: bool) -> None:
        text = config.get_text_config(decoder=True)
        window = getattr(text, "sliding_window", None)
        types = set(getattr(text, "layer_types", None) or ())
        if types - _KNOWN:
            raise ValueError(f"it has layers of type {', '.join(sorted(types - _KNOWN))}")
        if not types:
            types = {"full_attention" if window is None else "sliding_attention"}
        self._windows = {name: window if name == "sliding_attention" else None for name in sorted(types)}
        self._dtype = dtype
        self._lowest = torch.finfo(dtype).min
        self._plain = not explicit and all(window is None for window in self._windows.values())

    def _masks(self, positions: torch.Tensor, width: int) -> Masks:
        distance = positions.unsqueeze(-1) - torch.arange(width, device=positions.device)

        def mask(window: int | None) -> torch.Tensor:
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
            return zeros.masked_fill_(hidden, self._lowest).unsqueeze(1)

        return self.for_layers(mask)

    def for_layers(self, mask: Callable[[int | None], torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Make the mask of each type of layer from its window, as the model takes them."""
        found = {name: mask(window) for name, window in self._windows.items()}
        return found if len(found) > 1 else next(iter(found.values()))

    def for_prompts(self, rows: int, length: int, device: torch.device) -> Masks:
        """For prompts that begin at column 0: masks [rows, 1, length, length], or None.

        Padding stands behind a prompt, where causality hides it from every real token.
        """
        if self._plain:
            return None
        return self._masks(torch.arange(length, device=device).expand(rows, length), length)

    def for_tokens(self, positions: torch.Tensor, width: int) -> Masks:
        """For one token of each row at `positions` [B] int64, over `width` columns: masks [B, 1, 1, width]."""
        return self._masks(positions.unsqueeze(1), width)
