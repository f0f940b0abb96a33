"""Distillation on the policy's own answers: each token is worth what a teacher thinks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


def closer_to_the_teacher(batch: PackedBatch) -> torch.Tensor:
    """A_t = log teacher(y_t) - log π(y_t): a sample of minus the KL from the policy to the teacher, [T] float32."""
    return torch.where(batch["loss_mask"], batch["teacher_logprobs"] - batch["proximal_logprobs"], 0.0)
