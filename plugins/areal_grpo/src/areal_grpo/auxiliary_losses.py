"""What an update learns beside the policy: functions of its minibatch that return a role's `LossSpec`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_core.sdk import CRITIC, LossResult, LossSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context


def value_regression(minibatch: PackedBatch, context: Context, *, clip: float | None) -> LossSpec:
    """The critic learns the `returns` [T] of the tokens in the loss; see `value_loss`."""
    del context
    mask = minibatch["loss_mask"]
    spread = minibatch["returns"][mask].double().var(correction=0) if bool(mask.any()) else torch.zeros(())
    batch = minibatch.with_tokens(return_variance=torch.full_like(minibatch["returns"], float(spread)))
    return LossSpec(CRITIC.name, batch, ("values",), partial(value_loss, clip=clip))


def value_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor], *, clip: float | None) -> LossResult:
    """Σ w_t max(½ (V - R)², ½ (V_old + clip(V - V_old, -c, c) - R)²), with w the update's `loss_weights`.

    The clipping is that of OpenAI Baselines' PPO; the paper (arXiv 1707.06347, equation 9) has (V - R)² alone, which is
    twice what is left here without a clip.

    Args:
        batch: with `returns`, `loss_weights`, `loss_mask`, and, where it is clipped, `values`: V_old; each [T].
        outputs: `values` [T] with gradients.
        clip: c, how far a value is led away from V_old in the updates on one batch; None does not bound it.

    Returns:
        The sum, and as means over the tokens in the loss `value_loss`, `value_clip_fraction` (tokens from which
        clipping takes the gradient) and `explained_variance`, 1 - (V - R)² / var R with the variance over the whole
        update: a plain mean, so it adds up over micro-batches. It is 1 for a perfect critic and 0 for one that only
        knows the mean; a constant error counts against it.
    """
    mask = batch["loss_mask"]
    # Where the mask is off a value may be anything, infinite included: select before anything is computed.
    values, returns = torch.where(mask, outputs["values"], 0.0), torch.where(mask, batch["returns"], 0.0)
    error = (values - returns).square()
    losses, is_clipped = error / 2, torch.zeros_like(mask)
    if clip is not None:
        old = torch.where(mask, batch["values"], 0.0)
        # What lies within the bounds stays as it is, to the last bit: it must not count as clipped.
        bounded = (values.clamp(old - clip, old + clip) - returns).square() / 2
        is_clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    variance = batch["return_variance"]
    explained = torch.where(variance > 0, 1 - error / variance, 0.0)
    logged = {"value_loss": losses, "value_clip_fraction": is_clipped.float(), "explained_variance": explained}
    metrics = {name: Metric.mean(value, mask) for name, value in logged.items()}
    return LossResult((losses * torch.where(mask, batch["loss_weights"], 0.0)).sum(), metrics)
