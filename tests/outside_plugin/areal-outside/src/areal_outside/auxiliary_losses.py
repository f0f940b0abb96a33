"""An auxiliary loss: what a critic learns in the same update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from areal_core.data import Metric
from areal_core.interfaces import CRITIC, LossResult, LossSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.interfaces import Context


def value(minibatch: PackedBatch, context: Context, *, scale: float) -> LossSpec:
    """The squared distance from the reward of the sequence, weighted as the policy's tokens are."""

    def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        target = part["reward"][part.tokens.row_index]
        errors = torch.where(part["loss_mask"], scale * (outputs["values"] - target).square(), 0.0)
        return LossResult((errors * part["loss_weights"]).sum(), {"error": Metric.mean(errors, part["loss_mask"])})

    return LossSpec(CRITIC.name, minibatch, ("values",), loss)
