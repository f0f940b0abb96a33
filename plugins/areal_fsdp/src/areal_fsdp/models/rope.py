"""Rotary embeddings whose frequencies follow the longest sequence of a batch: each sequence gets those of its own.

transformers chooses the frequencies of `longrope` and `dynamic` rotary embeddings once for a batch, by its largest
position. A sequence beyond the original context then changes the positions of all others in its batch. Here such a
module computes each sequence alone, as transformers does for a batch of one.
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
    """Whether a module is a rotary embedding whose frequencies depend on the batch."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def divide_rotary(model: PreTrainedModel, shared: Mixers) -> list[str]:
    """Let the rotary embeddings that follow the longest sequence compute each sequence alone; return their names.

    Args:
        model: whose modules' `forward` is replaced; names and buffers stay.
        shared: has the layout of the batch that is computed.
    """
    names = [name for name, module in model.named_modules() if follows_longest(module)]
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = _by_sequence(module.forward, shared)
    return names


def _by_sequence(own: Any, shared: Mixers) -> Any:
    @wraps(own)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        layout = shared.layout
        if layout is None:
            return own(x, position_ids, *others, **named)
        if position_ids.dim() != 2:
            raise RunError(
                "a rotary embedding of several axes follows the longest sequence of a batch: not computed here"
            )
        by_length = {
            length: own(x, torch.arange(length, device=x.device)[None], *others, **named)
            for length in dict.fromkeys(layout.lengths)
        }
        each = [by_length[length] for length in layout.lengths]
        parts = (list(part) for part in zip(*each, strict=True))  # cosines, then sines: [1, length, size] each
        if not layout.in_rows:
            return tuple(torch.cat(part, 1) for part in parts)
        longest_first = (sorted(part, key=lambda rows: rows.shape[1], reverse=True) for part in parts)  # as rows are
        return tuple(
            torch.cat([F.pad(rows, (0, 0, 0, part[0].shape[1] - rows.shape[1])) for rows in part])
            for part in longest_first
        )

    return forward
