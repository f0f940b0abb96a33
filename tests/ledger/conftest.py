"""What the ledger's tests write down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.data import PackedBatch, PromptGroup, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable


def _batch_of(numbers: list[int], tokens: int = 8) -> tuple[list[PromptGroup], PackedBatch]:
    """A group of one sequence for each number."""
    trajectories = [
        Trajectory(
            {
                "input_ids": torch.full((tokens,), number),
                "loss_mask": torch.ones(tokens, dtype=torch.bool),
                "logprobs": torch.zeros(tokens),
                "versions": torch.zeros(tokens, dtype=torch.int32),
                "turn_ids": torch.zeros(tokens, dtype=torch.int32),
            },
            {"group_id": torch.tensor(number), "oldest_version": torch.tensor(0, dtype=torch.int32)},
        )
        for number in numbers
    ]
    batch = PackedBatch.from_trajectories(trajectories)
    return [PromptGroup(n, (n, 0), batch=batch, rows=range(i, i + 1)) for i, n in enumerate(numbers)], batch


@pytest.fixture
def batch_of() -> Callable[..., tuple[list[PromptGroup], PackedBatch]]:
    """Makes groups of one sequence, and the batch that they are packed in."""
    return _batch_of
