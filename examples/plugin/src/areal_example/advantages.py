"""An advantage: what each answer of a batch earns its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from areal_core.data import group_mean

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


def better_or_worse(batch: PackedBatch, *, margin: float) -> torch.Tensor:
    """A_i = sign(R_i - mean_j R_j), and 0 where the difference is within `margin`; [B] float32."""
    rewards = batch["reward"].double()
    difference = rewards - group_mean(batch, rewards)
    return torch.where(difference.abs() > margin, difference.sign(), 0.0).float()
