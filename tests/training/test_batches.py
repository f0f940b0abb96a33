"""Metrics of a batch."""

from __future__ import annotations

import torch

from areal_core.data import PackedBatch, Trajectory
from areal_core.training.batches import batch_metrics


def test_the_share_of_groups_from_which_nothing_can_be_learned() -> None:
    tokens = {
        "input_ids": torch.arange(3), "loss_mask": torch.ones(3, dtype=torch.bool), "logprobs": torch.zeros(3),
        "versions": torch.zeros(3, dtype=torch.int32), "turn_ids": torch.zeros(3, dtype=torch.int32),
    }  # fmt: skip
    rewards = {4: [-1.0, -1.0], 7: [0.0, 1.0], 9: [0.5, 0.5], 2: [0.0, -0.25], 11: [3.0]}
    rows = [
        Trajectory(tokens, {"group_id": torch.tensor(group), "reward": torch.tensor(reward),
                            "finish_reason": torch.tensor(0, dtype=torch.int8)})
        for group, values in rewards.items() for reward in values
    ]  # fmt: skip
    assert batch_metrics(PackedBatch.from_trajectories(rows))["reward/groups_all_equal"] == 0.5
