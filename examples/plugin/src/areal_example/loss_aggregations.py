"""A loss aggregation: the weight of each token in an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from areal_core.data import PackedBatch


def square_root_length(minibatch: PackedBatch) -> torch.Tensor:
    """Weigh an answer by the square root of its length: w_t = 1/√|y_i| over the sum of √|y_j|, [T] float32, sum 1."""
    mask, row = minibatch["loss_mask"].float(), minibatch.tokens.row_index
    root = mask.new_zeros(len(minibatch)).index_add(0, row, mask).clamp(min=1).sqrt()
    return mask / root[row] / root.sum()
