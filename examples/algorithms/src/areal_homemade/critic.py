"""PPO with a critic: advantages from its values, the regression that teaches them, and the clipped loss."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_core.sdk import CRITIC, LossResult, LossSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context, PolicyTerms


def gae(batch: PackedBatch, *, discount: float, smoothing: float) -> dict[str, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438); what others have written is stepped over.

    Returns:
        `advantages` and `returns`, [T] float32.
    """
    values, advantages = batch["values"].tolist(), torch.zeros(batch.token_count)
    prices = batch["token_rewards"].tolist() if "token_rewards" in batch else [0.0] * batch.token_count
    is_action = batch["loss_mask"].tolist()
    for row, (start, end) in enumerate(pairwise(batch.tokens.offsets.tolist())):
        reward, value_ahead, advantage_ahead = float(batch["reward"][row]), 0.0, 0.0
        for t in (t for t in reversed(range(start, end)) if is_action[t]):
            surprise = prices[t] + reward + discount * value_ahead - values[t]
            advantage_ahead = surprise + discount * smoothing * advantage_ahead
            advantages[t], value_ahead, reward = advantage_ahead, values[t], 0.0
    return {"advantages": advantages, "returns": advantages + batch["values"]}


def value_regression(minibatch: PackedBatch, context: Context) -> LossSpec:
    """The critic's part of an update: ½ (V - return)², weighted as the policy's tokens are."""

    def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        errors = torch.where(part["loss_mask"], (outputs["values"] - part["returns"]).square() / 2, 0.0)
        return LossResult((errors * part["loss_weights"]).sum(), {"error": Metric.mean(errors, part["loss_mask"])})

    return LossSpec(CRITIC.name, minibatch, ("values",), loss)


def clipped(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -min(r A, clip(r, 0.8, 1.2) A) (PPO, arXiv 1707.06347, equation 7), [T]."""
    ratio = torch.where(terms.mask, terms.logprobs - terms.proximal_logprobs, 0.0).clamp(-20, 20).exp()
    bounded = ratio.clamp(0.8, 1.2)
    losses = -torch.minimum(ratio * terms.advantages, bounded * terms.advantages)
    return losses, {"clip_fraction": (ratio != bounded).float()}
