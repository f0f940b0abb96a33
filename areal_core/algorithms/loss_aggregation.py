"""How the losses of tokens are added up. Each function gives the weight of every token in the summed loss.

They are computed once on all sequences of an optimizer update; the weights do not change when the batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch


def token_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Every token counts the same: 1 / N for N tokens in the loss (DAPO, arXiv 2503.14476, equation 8).

    An episode counts by its tokens, whatever number of trajectories it has. Tokens that a correction masks stay in N,
    as in AReaL and slime; verl's rejection removes them.

    Args:
        minibatch: all sequences of an update, with `loss_mask` [T] bool.

    Returns:
        [T] float32, 0 outside `loss_mask`.
    """
    mask = minibatch["loss_mask"].float()
    return mask / mask.sum().clamp(min=1)


def sequence_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Every sequence counts the same: 1 / (B T_i) in a sequence of T_i tokens (GRPO, arXiv 2402.03300, equation 3).

    Sequences without a token in the loss count in B, as a loss of 0, as in TRL; verl and OpenRLHF leave them out. An
    episode of several trajectories counts several times. Arguments and result as in `token_mean`.
    """
    return _shares(minibatch, minibatch.tokens.row_index, len(minibatch))


def episode_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Every episode counts the same: 1 / (E T_e) in one of T_e tokens in all of its trajectories.

    The `sequence_mean` of workflows whose episodes leave different numbers of trajectories; it reads `episode_id` [B].
    """
    episodes, episode = torch.unique(minibatch["episode_id"], return_inverse=True)
    return _shares(minibatch, episode[minibatch.tokens.row_index], len(episodes))


def constant_length(minibatch: PackedBatch, *, length: int) -> torch.Tensor:
    """Every token counts 1 / (B L) with a constant L (Dr. GRPO, arXiv 2503.20783).

    Sequences without a token in the loss count in B, as in `sequence_mean`.

    Args:
        minibatch: as in `token_mean`.
        length: L, usually the longest response allowed.
    """
    return minibatch["loss_mask"].float() / (len(minibatch) * length)


def _shares(minibatch: PackedBatch, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """1 / owners for each owner, spread over its tokens in the loss; `owner` [T] says whose a token is."""
    mask = minibatch["loss_mask"].float()
    count = torch.zeros(owners, device=mask.device).index_add(0, owner, mask)
    return mask / (count[owner].clamp(min=1) * owners)
