"""What advantages are computed from: rewards of episodes, and means and deviations over the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent, group_mean, group_standard_deviation

if TYPE_CHECKING:
    from areal_core.data import PackedBatch

EPSILON = 1e-8
"""Added to a variance before its root."""


def token_rewards(batch: PackedBatch) -> torch.Tensor | None:
    """`token_rewards` [T] float64 on the tokens in the loss, 0 elsewhere; None where the batch has none.

    Position t holds what was earned by writing `targets[t]`: a penalty that a transform has added, or what a workflow
    gave for single tokens. Tokens that are not learned from earn nothing.
    """
    rewards = batch.get("token_rewards")
    return None if rewards is None else torch.where(batch["loss_mask"], rewards.double(), 0.0)


def episode_token_rewards(batch: PackedBatch) -> torch.Tensor:
    """[B] float64: the sum of `token_rewards` over all trajectories of each one's episode and agent, or else 0."""
    total = torch.zeros(len(batch), dtype=torch.float64, device=batch.lengths.device)
    rewards = token_rewards(batch)
    if rewards is None:
        return total
    episode = by_agent(batch, "episode_id")
    return total.index_add(0, episode[batch.tokens.row_index], rewards)[episode]


def episode_rewards(batch: PackedBatch) -> torch.Tensor:
    """[B] float64: `reward`, and what the episode's tokens have earned beside it.

    In float32 the rounding of a mean would no longer be small beside an ε where all rewards are equal.
    """
    return batch["reward"].double() + episode_token_rewards(batch)


def batch_moments(batch: PackedBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased standard deviation over all episodes of the batch, each [B]; for each agent by itself.

    Args:
        batch: has `group_id` and `episode_id`.
        values: [B].
    """
    whole = batch.with_sequences(group_id=torch.zeros_like(batch["group_id"]))
    return group_mean(whole, values), group_standard_deviation(whole, values)


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x - mean x) / sqrt(var x + 1e-8) over the masked tokens of a batch, var unbiased, as in TRL's and verl's PPO.

    Args:
        values: [T], anything where the mask is off.
        mask: [T] bool.

    Returns:
        [T], 0 outside the mask; 0 everywhere where there are fewer than two tokens, or no two differ.
    """
    inside = values[mask]
    deviation = inside - inside.mean()
    variance = deviation.square().sum() / max(len(inside) - 1, 1)
    return torch.zeros_like(values).masked_scatter(mask, deviation / (variance + EPSILON).sqrt())
