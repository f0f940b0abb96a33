"""Statistics of prompt groups, keyed by `group_id` and never by position.

The functions take one value for each trajectory. An episode counts once, however many trajectories it left, with the
mean of theirs. Where the policy plays several parts in an episode (`agent_id`), each agent is compared with its like in
the group, and counts once in an episode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data.batch import PackedBatch


def group_sum(batch: PackedBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the episodes of each trajectory's group, and how many episodes the group has.

    Args:
        batch: has `group_id` and `episode_id`, and may have `agent_id`, each [B] int64.
        values: [B] float.

    Returns:
        The sum and the count, [B] in the dtype of `values`: each trajectory sees those of its own group.
    """
    group, episode = by_agent(batch, "group_id"), by_agent(batch, "episode_id")
    counts = torch.bincount(episode)
    means = values.new_zeros(len(counts)).index_add(0, episode, values) / counts
    group_of = group.new_zeros(len(counts)).index_copy(0, episode, group)
    groups = int(group.max()) + 1
    total = values.new_zeros(groups).index_add(0, group_of, means)
    return total[group], torch.bincount(group_of, minlength=groups).to(values.dtype)[group]


def by_agent(batch: PackedBatch, key: str) -> torch.Tensor:
    """[B] int64: which value of a key, and of `agent_id` where there is that, each trajectory has, counted from 0."""
    agent_id = batch.get("agent_id")
    if agent_id is None or not len(agent_id):
        return torch.unique(batch[key], return_inverse=True)[1]
    return torch.unique(torch.stack([batch[key], agent_id]), dim=1, return_inverse=True)[1]


def group_mean(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Mean over the episodes of each trajectory's group, [B]."""
    total, count = group_sum(batch, values)
    return total / count


def group_standard_deviation(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation over the episodes of each trajectory's group, [B]; 0 for a group of one."""
    deviation = values - group_mean(batch, values)
    total, count = group_sum(batch, deviation.square())
    return (total / (count - 1).clamp(min=1)).sqrt()
