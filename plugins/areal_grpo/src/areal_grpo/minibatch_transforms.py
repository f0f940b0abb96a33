"""Minibatch transforms: compute columns of an optimizer update's sequences, with the policy just before the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_grpo.ratios import log_ratio

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.sdk import Context


def m2po(minibatch: PackedBatch, context: Context, *, threshold: float, among: str) -> dict[str, torch.Tensor]:
    """Mask the tokens with the largest (log π - log μ)², until the mean of the others is at most `threshold` (M2PO,
    arXiv 2510.01161, Algorithm 1).

    π is the policy just before the update, μ the one that sampled. Only tokens that the update would move further away
    are averaged and masked: those with A > 0 and π > μ, or A < 0 and π < μ, as a trust region would. With `among: all`
    all tokens of the update are averaged and may be masked, as in AReaL; that also masks tokens which the update would
    bring back. Tokens with equal ratios are kept or masked together, so their order does not matter. If even the
    smallest value is above the threshold, all are masked. Denominators do not change. This takes one forward pass over
    the update's tokens.

    Args:
        minibatch: with `logprobs` [T] of the policy that sampled, `advantages` [T] and `loss_mask` [T].
        context: its `forward` computes the policy's log-probabilities.
        threshold: maximum mean in squared nats.
        among: `trust_region` or `all`.

    Returns:
        `trusted`: [T] bool, False outside `loss_mask`.
    """
    mask = minibatch["loss_mask"]
    current = context.forward("actor", minibatch, ["logprobs"])["logprobs"]
    difference = log_ratio(current, minibatch["logprobs"], mask)
    moment = difference.square()
    candidates = mask & (difference * minibatch["advantages"] > 0) if among == "trust_region" else mask
    ascending = moment[candidates].double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    kept = int((means <= threshold).sum())
    bound = float(ascending[kept]) if kept < len(ascending) else torch.inf
    trusted = mask & ~(candidates & (moment.double() >= bound))
    context.log("second_moment", Metric.mean(moment, candidates))
    context.log("distrusted_fraction", Metric.mean((~trusted).float(), mask))
    return {"trusted": trusted}


def entropy_target(
    minibatch: PackedBatch, context: Context, *, target: float, step: float, maximum: float
) -> dict[str, torch.Tensor]:
    """Set the coefficient c of an entropy bonus from the entropy H just before each update (Skywork-OR1, 2505.22312).

    c starts at 0. It grows by `step` if H is below `target`, else it shrinks by `step`, between 0 and `maximum`. An
    update has the bonus only if H is at most `target`, and uses c after its own change. Skywork-OR1 and TRL use c
    before the change, so they are one update behind. Use it with the regularizer `adaptive_entropy`.

    Args:
        minibatch: with `loss_mask` [T].
        context: its `forward` computes the policy's entropy, one pass for each update; its `state` stores c.
        target: target entropy in nats per token.
        step: change of c with each update.
        maximum: upper bound of c.

    Returns:
        `entropy_coefficient`: [T] float32, the same for all tokens.
    """
    mask = minibatch["loss_mask"]
    token_entropy = context.forward("actor", minibatch, ["entropy"])["entropy"]
    entropy = float(torch.where(mask, token_entropy, 0.0).double().sum() / mask.sum().clamp(min=1))
    previous = float(context.state.get("entropy_target/coefficient", torch.zeros(())))
    change = step if entropy < target else -step
    updated = torch.tensor(previous + change, dtype=torch.float64).clamp(0.0, maximum)
    context.state["entropy_target/coefficient"] = updated
    used = float(updated) if entropy <= target else 0.0
    context.log("entropy_coefficient", Metric.mean(used))
    return {"entropy_coefficient": torch.full(mask.shape, used)}
