"""A reward of every token for staying near the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.sdk import Context


def kl_in_reward(batch: PackedBatch, context: Context, *, coefficient: float) -> dict[str, torch.Tensor]:
    """-β (log π - log reference) of each token, as `token_rewards` [T] (InstructGPT, arXiv 2203.02155, equation 2)."""
    distance = torch.where(batch["loss_mask"], batch["proximal_logprobs"] - batch["reference_logprobs"], 0.0)
    context.log("distance", Metric.mean(distance, batch["loss_mask"]))
    return {"token_rewards": -coefficient * distance}
