"""The shift by one, done once, for every per-token key together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch

_UNSHIFTED = frozenset({"input_ids"})
_FILL = {"versions": -1, "turn_ids": -1}


def shift_to_predictions(batch: PackedBatch) -> PackedBatch:
    """Move every per-token value from the token it describes to the position that predicts that token.

    A causal model's output at position t is about token t + 1. After the shift all keys but `input_ids` at position t
    describe token t + 1 of the same sequence; `targets` [sum(T)] int64 is that token. The last position of a sequence
    predicts nothing: its `loss_mask` is False, its version -1, and its other values 0.
    """
    last = batch.tokens.offsets[1:] - 1
    shifted: dict[str, torch.Tensor] = {}
    for key, value in batch.tokens.values.items():
        if key in _UNSHIFTED:
            continue
        moved = torch.roll(value, -1, dims=0)
        moved[last] = _FILL.get(key, 0)
        shifted[key] = moved
    targets = torch.roll(batch["input_ids"], -1)
    targets[last] = 0
    return batch.with_tokens(targets=targets, **shifted)
