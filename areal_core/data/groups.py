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
    """Return the sum over the episodes of each trajectory's group, and the number of these episodes.

    Args:
        batch: has `group_id` and `episode_id`, and may have `agent_id`, each [B] int64.
        values: [B] float.

    Returns:
        The sum and the count, [B] in the dtype of `values`: each trajectory sees those of its own group.

    Example:
        >>> from areal_core.data import PackedBatch, Ragged, group_standard_deviation, group_sum
        >>> tokens = Ragged(torch.ones(4, dtype=torch.int64), {"input_ids": torch.tensor([5, 6, 7, 8])})
        >>> ids = {"group_id": torch.tensor([3, 3, 3, 4]), "episode_id": torch.tensor([0, 1, 2, 3])}
        >>> batch = PackedBatch(tokens, ids)
        >>> rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
        >>> total, count = group_sum(batch, rewards)
        >>> total.tolist(), count.tolist()
        ([3.0, 3.0, 3.0, 5.0], [3.0, 3.0, 3.0, 1.0])
        >>> group_standard_deviation(batch, rewards).tolist()
        [1.0, 1.0, 1.0, 0.0]
    """
    group, episode = by_agent(batch, "group_id"), by_agent(batch, "episode_id")
    counts = torch.bincount(episode)
    means = values.new_zeros(len(counts)).index_add(0, episode, values) / counts
    group_of = group.new_zeros(len(counts)).index_copy(0, episode, group)
    groups = int(group.max()) + 1
    total = values.new_zeros(groups).index_add(0, group_of, means)
    return total[group], torch.bincount(group_of, minlength=groups).to(values.dtype)[group]


def by_agent(batch: PackedBatch, key: str) -> torch.Tensor:
    """Number the values of a key, per agent if the batch has `agent_id`. Return the number of each trajectory.

    Args:
        batch: may have `agent_id`, [B] int64.
        key: a key per trajectory, [B] int64, such as `group_id` or `episode_id`.

    Returns:
        Numbers from 0, [B] int64. Trajectories with the same value and the same agent have the same number.

    Example:
        >>> from areal_core.data import PackedBatch, Ragged, by_agent
        >>> tokens = Ragged(torch.ones(3, dtype=torch.int64), {"input_ids": torch.tensor([5, 6, 7])})
        >>> batch = PackedBatch(tokens, {"group_id": torch.tensor([7, 7, 9])})
        >>> by_agent(batch, "group_id").tolist()
        [0, 0, 1]
        >>> batch.sequences["agent_id"] = torch.tensor([1, 2, 1])  # a planner and a solver
        >>> by_agent(batch, "group_id").tolist()
        [0, 1, 2]
    """
    agent_id = batch.get("agent_id")
    if agent_id is None or not len(agent_id):
        return torch.unique(batch[key], return_inverse=True)[1]
    return torch.unique(torch.stack([batch[key], agent_id]), dim=1, return_inverse=True)[1]


def group_mean(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the episodes of each trajectory's group, [B]. For the arguments see `group_sum`."""
    total, count = group_sum(batch, values)
    return total / count


def group_standard_deviation(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation over the episodes of each trajectory's group, [B].

    It is 0 for a group with one episode. For the arguments and an example see `group_sum`.
    """
    deviation = values - group_mean(batch, values)
    total, count = group_sum(batch, deviation.square())
    return (total / (count - 1).clamp(min=1)).sqrt()
