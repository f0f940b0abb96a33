"""Advantages from comparing the answers to one prompt. Statistics count episodes and are keyed by `group_id`.

Each function takes the whole batch (`reward` [B] float32, `group_id` and `episode_id` [B] int64) and returns [B]
float32, equal for the trajectories of one episode. In a group of one there is nothing to compare with: 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.data.groups import group_mean, group_standard_deviation, group_sum

if TYPE_CHECKING:
    import torch

    from areal_core.data.batch import PackedBatch


def group_normalised(batch: PackedBatch, *, epsilon: float) -> torch.Tensor:
    """A_i = (R_i - mean R) / (std R + ε), std unbiased (GRPO, arXiv 2402.03300, section 4.1.2)."""
    rewards = _rewards(batch)
    deviation = rewards - group_mean(batch, rewards)
    return (deviation / (group_standard_deviation(batch, rewards) + epsilon)).float()


def group_centred(batch: PackedBatch) -> torch.Tensor:
    """A_i = R_i - mean R (Dr. GRPO, arXiv 2503.20783): hard and easy prompts are not weighted up."""
    rewards = _rewards(batch)
    return (rewards - group_mean(batch, rewards)).float()


def leave_one_out(batch: PackedBatch) -> torch.Tensor:
    """A_i = R_i - mean_{j≠i} R_j (RLOO, arXiv 2402.14740): the baseline does not depend on the answer itself."""
    rewards = _rewards(batch)
    total, count = group_sum(batch, rewards)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return (rewards - others).where(count > 1, 0.0).float()


def _rewards(batch: PackedBatch) -> torch.Tensor:
    """[B] float64: in float32 the rounding of a mean is no longer small beside ε when all rewards are equal."""
    return batch["reward"].double()
