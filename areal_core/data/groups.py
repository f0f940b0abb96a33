"""Statistics of prompt groups, keyed by `group_id` and never by position.

An episode counts once, however many trajectories it left: the functions take one value for each trajectory and read
the episode's value from its first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch


def group_sum(batch: PackedBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the episodes of each trajectory's group, and how many episodes the group has.

    Args:
        batch: has `group_id` and `episode_id`, each [B] int64.
        values: [B] float, equal for the trajectories of one episode.

    Returns:
        The sum and the count, [B] in the dtype of `values`: each trajectory sees those of its own group.
    """
    _, group = torch.unique(batch["group_id"], return_inverse=True)
    first = _first_of_episode(batch["episode_id"]).to(values.dtype)
    groups = int(group.max()) + 1
    total = values.new_zeros(groups).index_add(0, group, values * first)
    count = values.new_zeros(groups).index_add(0, group, first)
    return total[group], count[group]


def group_mean(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Mean over the episodes of each trajectory's group, [B]."""
    total, count = group_sum(batch, values)
    return total / count


def group_standard_deviation(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation over the episodes of each trajectory's group, [B]; 0 for a group of one."""
    deviation = values - group_mean(batch, values)
    total, count = group_sum(batch, deviation.square())
    return (total / (count - 1).clamp(min=1)).sqrt()


def _first_of_episode(episode_id: torch.Tensor) -> torch.Tensor:
    """[B] bool: the first trajectory of each episode in the batch."""
    _, episode = torch.unique(episode_id, return_inverse=True)
    rows = torch.arange(len(episode), device=episode.device)
    first_row = torch.full_like(rows, len(rows)).scatter_reduce(0, episode, rows, "amin")
    return first_row[episode] == rows
