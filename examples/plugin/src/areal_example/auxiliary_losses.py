"""An auxiliary loss: what another model learns in the same update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from areal_core.data import Metric
from areal_core.sdk import CRITIC, LossResult, LossSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context


def reward_regression(minibatch: PackedBatch, context: Context) -> LossSpec:
    """Teach the critic to predict the reward of an answer from each of its tokens: mean (V_t - R)²."""
    del context

    def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        target = part["reward"][part.tokens.row_index]
        errors = torch.where(part["loss_mask"], (outputs["values"] - target).square(), 0.0)
        return LossResult((errors * part["loss_weights"]).sum(), {"error": Metric.mean(errors, part["loss_mask"])})

    return LossSpec(CRITIC.name, minibatch, ("values",), loss)
