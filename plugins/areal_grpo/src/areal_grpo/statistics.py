"""Statistics for advantages: rewards of episodes, and means and deviations over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent, group_mean, group_standard_deviation

if TYPE_CHECKING:
    from areal_core.data import PackedBatch

EPSILON = 1e-8
"""Added to a variance before its square root."""


def token_rewards(batch: PackedBatch) -> torch.Tensor | None:
    """Return `token_rewards` [T] float64 with 0 outside the loss; None if the batch has none.

    Position t holds the reward for `targets[t]`: a penalty that a transform has added, or a reward that a workflow gave
    to a single token.
    """
    rewards = batch.get("token_rewards")
    return None if rewards is None else torch.where(batch["loss_mask"], rewards.double(), 0.0)


def episode_token_rewards(batch: PackedBatch) -> torch.Tensor:
    """Return the sum of `token_rewards` over all trajectories of each sequence's episode and agent, [B] float64."""
    total = torch.zeros(len(batch), dtype=torch.float64, device=batch.lengths.device)
    rewards = token_rewards(batch)
    if rewards is None:
        return total
    episode = by_agent(batch, "episode_id")
    return total.index_add(0, episode[batch.tokens.row_index], rewards)[episode]


def episode_rewards(batch: PackedBatch) -> torch.Tensor:
    """Return `reward` plus the rewards of the episode's tokens, [B] float64.

    In float32 the rounding error of a mean would not be small compared with ε if all rewards are equal.
    """
    return batch["reward"].double() + episode_token_rewards(batch)


def batch_moments(batch: PackedBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased standard deviation over all episodes of the batch, each [B], separately for each agent.

    Args:
        batch: with `group_id` and `episode_id`.
        values: [B].
    """
    whole = batch.with_sequences(group_id=torch.zeros_like(batch["group_id"]))
    return group_mean(whole, values), group_standard_deviation(whole, values)


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (x - mean x) / sqrt(var x + 1e-8) over the masked tokens of a batch, with the unbiased variance, as in
    TRL's and verl's PPO.

    Args:
        values: [T], any values outside the mask.
        mask: [T] bool.

    Returns:
        [T], 0 outside the mask; 0 everywhere if there are fewer than two tokens, or if all values are equal.
    """
    inside = values[mask]
    deviation = inside - inside.mean()
    variance = deviation.square().sum() / max(len(inside) - 1, 1)
    return torch.zeros_like(values).masked_scatter(mask, deviation / (variance + EPSILON).sqrt())
