"""Rotary embeddings whose frequencies depend on the longest sequence of a batch: compute each sequence separately.

transformers chooses the frequencies of `longrope` and `dynamic` rotary embeddings once per batch, by the largest
position. So a sequence longer than the original context changes all other sequences of its batch. Here such a module
computes each sequence separately, as transformers does for a batch of one.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from areal_core.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from areal_fsdp.models.mixers import Mixers


def follows_longest(module: torch.nn.Module) -> bool:
    """Return True for a rotary embedding whose frequencies depend on the batch."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def divide_rotary(model: PreTrainedModel, shared: Mixers) -> list[str]:
    """Make the rotary embeddings for which `follows_longest` is True compute each sequence separately.

    Args:
        model: the model; the `forward` of these modules is replaced, names and buffers stay.
        shared: provides the layout of the current batch.

    Returns:
        The names of these modules.
    """
    names = [name for name, module in model.named_modules() if follows_longest(module)]
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = _by_sequence(module.forward, shared)
    return names


def _by_sequence(original: Any, shared: Mixers) -> Any:
    @wraps(original)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        layout = shared.layout
        if layout is None:
            return original(x, position_ids, *others, **named)
        if position_ids.dim() != 2:
            raise RunError(
                "a rotary embedding with several axes whose frequencies depend on the longest sequence of a batch is "
                "not supported",
                hints=["use another model"],
            )
        by_length = {
            length: original(x, torch.arange(length, device=x.device)[None], *others, **named)
            for length in dict.fromkeys(layout.lengths)
        }
        by_sequence = [by_length[length] for length in layout.lengths]
        parts = (list(part) for part in zip(*by_sequence, strict=True))  # cosines, then sines: [1, length, size] each
        if not layout.in_rows:
            return tuple(torch.cat(part, 1) for part in parts)
        # Rows are sorted by length, the longest first.
        longest_first = (sorted(part, key=lambda rows: rows.shape[1], reverse=True) for part in parts)
        return tuple(
            torch.cat([F.pad(rows, (0, 0, 0, part[0].shape[1] - rows.shape[1])) for rows in part])
            for part in longest_first
        )

    return forward
