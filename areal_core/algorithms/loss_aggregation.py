"""Loss aggregations: each function returns the weight of every token in the summed loss.

The weights are computed once, on all sequences of an optimizer update. They do not change when the batch is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch


def token_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Weight every token equally: 1 / N for N tokens in the loss (DAPO, arXiv 2503.14476, equation 8).

    The weight of an episode is its number of tokens, in one or several trajectories. Tokens that a correction masks
    stay in N, as in AReaL and slime; verl's rejection removes them.

    Args:
        minibatch: all sequences of an update, with `loss_mask` [T] bool.

    Returns:
        [T] float32, 0 outside `loss_mask`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.sdk import constant_length, episode_mean, sequence_mean, token_mean
        >>> columns = {"input_ids": torch.arange(4), "loss_mask": torch.ones(4, dtype=torch.bool)}
        >>> episodes = {"episode_id": torch.tensor([0, 0])}  # one episode of two sequences
        >>> batch = PackedBatch(Ragged(torch.tensor([1, 3]), columns), episodes)
        >>> token_mean(batch)
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
        >>> sequence_mean(batch)
        tensor([0.5000, 0.1667, 0.1667, 0.1667])
        >>> episode_mean(batch)
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
        >>> constant_length(batch, length=10)
        tensor([0.0500, 0.0500, 0.0500, 0.0500])
    """
    mask = minibatch["loss_mask"].float()
    return mask / mask.sum().clamp(min=1)


def sequence_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Weight every sequence equally: 1 / (B T_i) in a sequence of T_i tokens (GRPO, arXiv 2402.03300, equation 3).

    Sequences without a token in the loss count in B, as a loss of 0, as in TRL; verl and OpenRLHF leave them out. An
    episode of several trajectories counts several times. See `token_mean` for arguments, result and an example.
    """
    return _shares(minibatch, minibatch.tokens.row_index, len(minibatch))


def episode_mean(minibatch: PackedBatch) -> torch.Tensor:
    """Weight every episode equally: 1 / (E T_e) in an episode of T_e tokens in all of its trajectories.

    It replaces `sequence_mean` for workflows whose episodes have different numbers of trajectories. It reads
    `episode_id` [B] int64. See `token_mean` for arguments, result and an example.
    """
    episodes, episode = torch.unique(minibatch["episode_id"], return_inverse=True)
    return _shares(minibatch, episode[minibatch.tokens.row_index], len(episodes))


def constant_length(minibatch: PackedBatch, *, length: int) -> torch.Tensor:
    """Weight every token by 1 / (B L) with a constant L (Dr. GRPO, arXiv 2503.20783).

    Sequences without a token in the loss count in B, as in `sequence_mean`. See `token_mean` for the result and an
    example.

    Args:
        minibatch: as in `token_mean`.
        length: L in tokens, usually the longest response allowed.
    """
    return minibatch["loss_mask"].float() / (len(minibatch) * length)


def _shares(minibatch: PackedBatch, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """1 / owners for each owner, spread over its tokens in the loss; `owner` [T] says whose a token is."""
    mask = minibatch["loss_mask"].float()
    count = torch.zeros(owners, device=mask.device).index_add(0, owner, mask)
    return mask / (count[owner].clamp(min=1) * owners)
