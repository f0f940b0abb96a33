"""Minibatch transforms: columns of one optimizer update's sequences, computed with the policy just before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_grpo.ratios import log_ratio

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.interfaces import Context


def m2po(minibatch: PackedBatch, context: Context, *, threshold: float) -> dict[str, torch.Tensor]:
    """Which tokens an update learns from: the largest (log π - log μ)² are left out until the mean of the others is at
    most `threshold` (M2PO, arXiv 2510.01161).

    π is the policy just before the update, μ the one that sampled. The mean is over all tokens of the update, and one
    pass over them is needed for it. Tokens with equal ratios stay or go together, so that their order does not matter;
    where even the smallest is over the threshold, none is learned from. Denominators stay as they are.

    Args:
        minibatch: with `logprobs` [T] of the policy that sampled, and `loss_mask` [T].
        context: its `forward` is asked for the policy's log-probabilities.
        threshold: in squared nats.

    Returns:
        `trusted`: [T] bool, False outside `loss_mask`.
    """
    mask = minibatch["loss_mask"]
    current = context.forward("actor", minibatch, ["logprobs"])["logprobs"]
    moment = log_ratio(current, minibatch["logprobs"], mask).square()
    ascending = moment[mask].double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    kept = int((means <= threshold).sum())
    bound = float(ascending[kept]) if kept < len(ascending) else torch.inf
    trusted = mask & (moment.double() < bound)
    context.log("second_moment", Metric.mean(moment, mask))
    context.log("distrusted_fraction", Metric.mean((~trusted).float(), mask))
    return {"trusted": trusted}


def entropy_target(
    minibatch: PackedBatch, context: Context, *, target: float, step: float, maximum: float
) -> dict[str, torch.Tensor]:
    """The coefficient c of an entropy bonus, led by the entropy H just before each update (Skywork-OR1, 2505.22312).

    c begins at 0; where H is below `target` it grows by `step`, where it is above it shrinks by as much, between 0 and
    `maximum`. An update has the bonus only where H is at most `target`. It is for the regularizer `adaptive_entropy`.

    Args:
        minibatch: with `loss_mask` [T].
        context: its `forward` is asked for the policy's entropy, one pass for each update; `state` keeps c.
        target, step, maximum: H in nats per token; the others of c.

    Returns:
        `entropy_coefficient`: [T] float32, the same for all tokens.
    """
    mask = minibatch["loss_mask"]
    found = context.forward("actor", minibatch, ["entropy"])["entropy"]
    entropy = float(torch.where(mask, found, 0.0).double().sum() / mask.sum().clamp(min=1))
    before = float(context.state.get("entropy_target/coefficient", torch.zeros(())))
    change = step if entropy < target else -step
    after = torch.tensor(before + change, dtype=torch.float64).clamp(0.0, maximum)
    context.state["entropy_target/coefficient"] = after
    used = float(after) if entropy <= target else 0.0
    context.log("entropy_coefficient", Metric.mean(used))
    return {"entropy_coefficient": torch.full(mask.shape, used)}
