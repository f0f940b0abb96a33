"""Advantages that compare the answers to one prompt. Statistics are over the episodes of a `group_id`.

Each function takes the whole batch (`reward` [B] float32, `group_id` and `episode_id` [B] int64, and `token_rewards`
[T] if there are any). It returns [B] in the dtype of `reward`, equal for all trajectories of an episode. R_i is the
total reward of episode i: its reward and the sum of its tokens' rewards. In a group of one the advantage is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import group_mean, group_standard_deviation, group_sum
from areal_grpo.statistics import batch_moments, episode_rewards, episode_token_rewards, whitened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch


def group_normalized(batch: PackedBatch, *, epsilon: float) -> torch.Tensor:
    """Return A_i = (R_i - mean R) / (std R + ε), with the unbiased std (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return _normalized(batch, episode_rewards(batch), epsilon).to(batch["reward"].dtype)


def group_centered(batch: PackedBatch) -> torch.Tensor:
    """Return A_i = R_i - mean R (Dr. GRPO, arXiv 2503.20783). Hard and easy prompts get no larger weights."""
    rewards = episode_rewards(batch)
    return (rewards - group_mean(batch, rewards)).to(batch["reward"].dtype)


def leave_one_out(batch: PackedBatch) -> torch.Tensor:
    """Return A_i = R_i - mean_{j≠i} R_j (RLOO, arXiv 2402.14740). The baseline does not depend on the answer itself."""
    rewards = episode_rewards(batch)
    total, count = group_sum(batch, rewards)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return (rewards - others).where(count > 1, 0.0).to(batch["reward"].dtype)


def lite_ppo(batch: PackedBatch, *, epsilon: float) -> torch.Tensor:
    """Return A_i = (R_i - mean R of the group) / (std R of the batch + ε) (Lite PPO, arXiv 2508.08221).

    The std is unbiased and around the mean of the batch, so nearly equal rewards in a group are not amplified.
    """
    rewards = episode_rewards(batch)
    _, deviation = batch_moments(batch, rewards)
    return ((rewards - group_mean(batch, rewards)) / (deviation + epsilon)).to(batch["reward"].dtype)


def max_rl(batch: PackedBatch) -> torch.Tensor:
    """Return A_i = (R_i - mean R) / mean R, or 0 if the mean is not positive (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 this maximizes the likelihood of a right answer, so hard prompts count more. Rewards must
    not be negative.
    """
    rewards = episode_rewards(batch)
    mean = group_mean(batch, rewards)
    is_positive = mean > 0
    return torch.where(is_positive, (rewards - mean) / mean.where(is_positive, 1.0), 0.0).to(batch["reward"].dtype)


def reinforce_pp_baseline(batch: PackedBatch) -> torch.Tensor:
    """Return A_i = R_i - mean R of the group for each token, whitened over all tokens in the loss (REINFORCE++ with a
    baseline, arXiv 2501.03262).

    Returns:
        [T] in the dtype of `reward`, 0 outside `loss_mask`. Long answers count more in the statistics.
    """
    rewards = episode_rewards(batch)
    centered = (rewards - group_mean(batch, rewards))[batch.tokens.row_index]
    return whitened(centered, batch["loss_mask"]).to(batch["reward"].dtype)


def gdpo(batch: PackedBatch, *, weights: Mapping[str, float], epsilon: float) -> torch.Tensor:
    """Return A_i = Σ_n w_n (r_in - mean r_n) / (std r_n + ε), normalized over the batch (GDPO, arXiv 2601.05242).

    Each named reward r_n is compared within the group, so a reward with small differences is not drowned by another.
    The sum is then reduced by its mean over all episodes of the batch and divided by their std + ε. All std are
    unbiased. Rewards of tokens, such as a KL penalty, are compared within the group but not divided by their std:
    that would cancel the coefficient of the penalty.

    Args:
        batch: with columns `reward.NAME` [B], which are the named rewards.
        weights: w by name; 1 for names that are missing.
        epsilon: ε.

    Raises:
        KeyError: the batch has no named rewards, or lacks one that has a weight.
    """
    rewards = {key.removeprefix("reward."): batch[key].double() for key in batch.sequences if key.startswith("reward.")}
    if not rewards or not weights.keys() <= rewards.keys():
        raise KeyError(f"gdpo has weights for {sorted(weights)}, but the batch has the rewards {sorted(rewards)}")
    total = torch.zeros(len(batch), dtype=torch.float64, device=batch.lengths.device)
    for name in sorted(rewards):
        total += weights.get(name, 1.0) * _normalized(batch, rewards[name], epsilon)
    token_total = episode_token_rewards(batch)
    total += token_total - group_mean(batch, token_total)
    mean, deviation = batch_moments(batch, total)
    return ((total - mean) / (deviation + epsilon)).to(batch["reward"].dtype)


def _normalized(batch: PackedBatch, rewards: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return (r_i - mean r) / (std r + ε) within the group, [B].

    An answer without this reward (NaN) counts as the mean.
    """
    judged = (~rewards.isnan()).to(rewards.dtype)
    mean = group_mean(batch, rewards.nan_to_num()) / group_mean(batch, judged).clamp(min=1e-12)
    rewards = torch.where(rewards.isnan(), mean, rewards)
    deviation = rewards - group_mean(batch, rewards)
    return deviation / (group_standard_deviation(batch, rewards) + epsilon)
