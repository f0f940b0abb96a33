"""Advantages that compare the answers to one prompt. Statistics are over the episodes of a `group_id`.

Each function takes the whole batch (`reward` [B] float32, `group_id` and `episode_id` [B] int64, and `token_rewards`
[T] if there are any). It returns [B] in the dtype of `reward`, equal for all trajectories of an episode. R_i is the
total reward of episode i: its reward and the sum of its tokens' rewards. In a group of one the advantage is 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent, group_mean, group_standard_deviation, group_sum
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

    With rewards of 0 and 1 this approaches the gradient of the log-likelihood of a right answer as groups grow, so hard
    prompts count more; take large groups. Rewards must not be negative.
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


def pass_at_k(batch: PackedBatch, *, k: int | None) -> torch.Tensor:
    """Return A_i = E_T[max(R_i, max_T R) - max_T R], T being k - 1 of the group's n - 1 other episodes: what answer i
    adds to the best of k (Tang et al., "Optimizing language models for inference time objectives", arXiv 2503.19595).

    This is the leave-one-out advantage of max@k; with rewards of 0 and 1 it is that of pass@k. The paper has k = n. For
    k < n the mean runs over all C(n - 1, k - 1) subsets T, as in PKPO (arXiv 2505.15201; there with the factor k / n
    and the baseline "leave one out minus one"). It is computed from the ordered rewards, without listing subsets. The
    baseline does not depend on the answer itself, so the mean of A_i ∇ log π over episodes is an unbiased estimate of
    ∇ max@k / k.

    No advantage is negative, and the worst answer has 0. With k = n only the best answer learns, by its distance to the
    second best; verl's `grpo_passk` divides this by the group's standard deviation, and here nothing is divided. k = 1
    is the mean reward: use `leave_one_out`.

    Args:
        batch: with `reward` [B] float32, `group_id` and `episode_id` [B] int64; `token_rewards` [T] are added.
        k: Number of answers of which the best counts, at least 2. None: all episodes of the group. A group with fewer
            episodes uses all of them.

    Returns:
        [B] in the dtype and unit of `reward`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> ids = {"group_id": torch.zeros(4, dtype=torch.int64), "episode_id": torch.arange(4)}
        >>> tokens = Ragged(torch.ones(4, dtype=torch.int64), {"input_ids": torch.tensor([5, 6, 7, 8])})
        >>> batch = PackedBatch(tokens, {"reward": torch.tensor([1.0, 0.0, 1.0, 0.0]), **ids})
        >>> pass_at_k(batch, k=2)  # 2 of a right answer's 3 siblings are wrong
        tensor([0.6667, 0.0000, 0.6667, 0.0000])
    """
    rewards = episode_rewards(batch)
    group, episode = by_agent(batch, "group_id"), by_agent(batch, "episode_id")
    count = int(episode.max()) + 1
    group_of_episode = group.new_zeros(count).index_copy(0, episode, group)
    reward_of_episode = rewards.new_zeros(count).index_copy(0, episode, rewards)
    advantages = torch.zeros_like(reward_of_episode)
    for number in range(int(group.max()) + 1):
        members = group_of_episode == number
        advantages[members] = _gains_of_the_best(reward_of_episode[members], k)
    return advantages[episode].to(batch["reward"].dtype)


def _gains_of_the_best(rewards: torch.Tensor, k: int | None) -> torch.Tensor:
    """Return A_i of `pass_at_k` for the n rewards of one group, [n].

    R_i exceeds max_T R by the gaps between ranked rewards that lie above all of T. A gap with m answers below it does
    so with probability C(m, k - 1) / C(n - 1, k - 1).
    """
    others = len(rewards) - 1
    drawn = others if k is None else min(k - 1, others)
    ranked, order = rewards.sort()
    below = [math.comb(m, drawn) / math.comb(others, drawn) for m in range(1, others + 1)]
    gains = torch.zeros_like(rewards)
    gains[order[1:]] = (ranked.diff() * rewards.new_tensor(below)).cumsum(0)
    return gains


def _normalized(batch: PackedBatch, rewards: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return (r_i - mean r) / (std r + ε) within the group, [B].

    An answer without this reward (NaN) counts as the mean.
    """
    judged = (~rewards.isnan()).to(rewards.dtype)
    mean = group_mean(batch, rewards.nan_to_num()) / group_mean(batch, judged).clamp(min=1e-12)
    rewards = torch.where(rewards.isnan(), mean, rewards)
    deviation = rewards - group_mean(batch, rewards)
    return deviation / (group_standard_deviation(batch, rewards) + epsilon)
