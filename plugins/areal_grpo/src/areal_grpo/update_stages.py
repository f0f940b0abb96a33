"""Update stages: columns of the sequences of one optimizer update, computed just before it with the policy as it is."""

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
    where even the smallest is over the threshold, none is learnt from. Denominators stay as they are.

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
