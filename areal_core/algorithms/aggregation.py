"""How the losses of tokens are added up. Each function gives the weight of every token in the summed loss.

They are computed once on all sequences of an optimizer update; the weights do not change when the batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.algorithm import Aggregation


def token_mean(loss_mask: torch.Tensor, row_index: torch.Tensor, rows: int) -> torch.Tensor:
    """Every token counts the same: 1 / N for N tokens in the loss (DAPO, arXiv 2503.14476, equation 8).

    Args:
        loss_mask: [T] bool.
        row_index: [T] int64, the sequence of each token.
        rows: sequences in the update.

    Returns:
        [T] float32, 0 outside `loss_mask`.
    """
    mask = loss_mask.float()
    return mask / mask.sum().clamp(min=1)


def sequence_mean(loss_mask: torch.Tensor, row_index: torch.Tensor, rows: int) -> torch.Tensor:
    """Every sequence counts the same: 1 / (B T_i) in a sequence of T_i tokens (GRPO, arXiv 2402.03300, equation 3).

    Sequences without a token in the loss count in B, as a loss of 0. Arguments and result as in `token_mean`.
    """
    mask = loss_mask.float()
    count = torch.zeros(rows, device=mask.device).index_add(0, row_index, mask)
    return mask / (count[row_index].clamp(min=1) * rows)


def constant_length(loss_mask: torch.Tensor, row_index: torch.Tensor, rows: int, *, length: int) -> torch.Tensor:
    """Every token counts 1 / (B L) with a constant L (Dr. GRPO, arXiv 2503.20783).

    Args:
        loss_mask, row_index, rows: as in `token_mean`.
        length: L, usually the longest response allowed.
    """
    return loss_mask.float() / (rows * length)


def with_weights(minibatch: PackedBatch, aggregation: Aggregation) -> PackedBatch:
    """Fix every token's weight on all sequences of an update; see `Algorithm.weigh`."""
    weights = aggregation(minibatch["loss_mask"], minibatch.tokens.row_index, len(minibatch))
    return minibatch.with_tokens(loss_weights=weights)
