"""Advantages from comparing the answers to one prompt. Statistics count episodes and are keyed by `group_id`.

Each function takes the whole batch (`reward` [B] float32, `group_id` and `episode_id` [B] int64, and `token_rewards`
[T] where there are) and returns [B] in the dtype of `reward`, equal for the trajectories of one episode. R is what an
episode has earned in all: its reward and that of its tokens. In a group of one there is nothing to compare with: 0.
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
    """A_i = (R_i - mean R) / (std R + ε), std unbiased (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return _normalized(batch, episode_rewards(batch), epsilon).to(batch["reward"].dtype)


def group_centered(batch: PackedBatch) -> torch.Tensor:
    """A_i = R_i - mean R (Dr. GRPO, arXiv 2503.20783): hard and easy prompts are not weighted up."""
    rewards = episode_rewards(batch)
    return (rewards - group_mean(batch, rewards)).to(batch["reward"].dtype)


def leave_one_out(batch: PackedBatch) -> torch.Tensor:
    """A_i = R_i - mean_{j≠i} R_j (RLOO, arXiv 2402.14740): the baseline does not depend on the answer itself."""
    rewards = episode_rewards(batch)
    total, count = group_sum(batch, rewards)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return (rewards - others).where(count > 1, 0.0).to(batch["reward"].dtype)


def lite_ppo(batch: PackedBatch, *, epsilon: float) -> torch.Tensor:
    """A_i = (R_i - mean R of the group) / (std R of the batch + ε), std unbiased and around the mean of the batch (Lite
    PPO, arXiv 2508.08221): a group of nearly equal rewards is not blown up."""
    rewards = episode_rewards(batch)
    _, deviation = batch_moments(batch, rewards)
    return ((rewards - group_mean(batch, rewards)) / (deviation + epsilon)).to(batch["reward"].dtype)


def max_rl(batch: PackedBatch) -> torch.Tensor:
    """A_i = (R_i - mean R) / mean R, and 0 where the mean is not positive (MaxRL, arXiv 2602.02710): with rewards of 0
    and 1 it leads towards the likelihood of a right answer, so that hard prompts count more. For rewards from 0 on."""
    rewards = episode_rewards(batch)
    mean = group_mean(batch, rewards)
    is_positive = mean > 0
    return torch.where(is_positive, (rewards - mean) / mean.where(is_positive, 1.0), 0.0).to(batch["reward"].dtype)


def reinforce_pp_baseline(batch: PackedBatch) -> torch.Tensor:
    """A_i = R_i - mean R of the group for each of its tokens, then whitened over all tokens in the loss (REINFORCE++
    with a baseline, arXiv 2501.03262).

    Returns:
        [T] in the dtype of `reward`, 0 outside `loss_mask`: long answers count more in the statistics.
    """
    rewards = episode_rewards(batch)
    centered = (rewards - group_mean(batch, rewards))[batch.tokens.row_index]
    return whitened(centered, batch["loss_mask"]).to(batch["reward"].dtype)


def gdpo(batch: PackedBatch, *, weights: Mapping[str, float], epsilon: float) -> torch.Tensor:
    """A_i = Σ_n w_n (r_in - mean r_n) / (std r_n + ε) over the named rewards, each compared within the group, then less
    its mean over all episodes of the batch and over their standard deviation + ε (GDPO, arXiv 2601.05242): no reward
    drowns another that varies less. Standard deviations are unbiased.

    What tokens have earned, such as a KL penalty, is compared within the group and keeps its scale: over its standard
    deviation the coefficient of a penalty would cancel.

    Args:
        batch: with columns `reward.NAME` [B], as workflows name their rewards.
        weights: w by name; 1 for one that is not named.
        epsilon: ε.

    Raises:
        KeyError: the batch has no named reward, or lacks one that has a weight.
    """
    rewards = {key.removeprefix("reward."): batch[key].double() for key in batch.sequences if key.startswith("reward.")}
    if not rewards or not weights.keys() <= rewards.keys():
        raise KeyError(f"gdpo has weights for {sorted(weights)}, and the batch has the rewards {sorted(rewards)}")
    total = torch.zeros(len(batch), dtype=torch.float64, device=batch.lengths.device)
    for name in sorted(rewards):
        total += weights.get(name, 1.0) * _normalized(batch, rewards[name], epsilon)
    single = episode_token_rewards(batch)
    total += single - group_mean(batch, single)
    mean, deviation = batch_moments(batch, total)
    return ((total - mean) / (deviation + epsilon)).to(batch["reward"].dtype)


def _normalized(batch: PackedBatch, rewards: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return (r_i - mean r) / (std r + ε) within the group, [B].

    An answer that the reward did not judge (NaN) counts as the mean.
    """
    judged = (~rewards.isnan()).to(rewards.dtype)
    mean = group_mean(batch, rewards.nan_to_num()) / group_mean(batch, judged).clamp(min=1e-12)
    rewards = torch.where(rewards.isnan(), mean, rewards)
    deviation = rewards - group_mean(batch, rewards)
    return deviation / (group_standard_deviation(batch, rewards) + epsilon)
