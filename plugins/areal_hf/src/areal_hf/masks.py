"""Attention masks over cached columns, for models with full attention and with sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

Masks = torch.Tensor | dict[str, torch.Tensor] | None
"""`attention_mask` of a model: one mask, or one for each type of layer, or None for plain causal attention."""

_KNOWN = {"full_attention", "sliding_attention"}


class AttentionMasks:
    """Builds additive masks: 0 for columns that a token attends to, the dtype's lowest number for others.

    Args:
        config: config of the model, which defines the layers with a window.
        dtype: dtype of the mask, that of the attention scores.
        explicit: True if the attention needs a causal mask for prompts.

    Raises:
        ValueError: a layer attends neither to all earlier tokens nor to a window of them.
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
        """Return the model's `attention_mask`, with `mask` called for the window of each type of layer."""
        masks = {name: mask(window) for name, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def for_prompts(self, rows: int, length: int, device: torch.device) -> Masks:
        """Return masks [rows, 1, length, length] for prompts that start at column 0, or None.

        Padding follows a prompt, so that the causal mask hides it from the prompt's tokens.
        """
        if self._plain:
            return None
        return self._masks(torch.arange(length, device=device).expand(rows, length), length)

    def for_tokens(self, positions: torch.Tensor, width: int) -> Masks:
        """Return masks [B, 1, 1, width] for one token of each row at `positions` [B] int64."""
        return self._masks(positions.unsqueeze(1), width)
