"""Auxiliary losses, such as a critic's: functions of an update's minibatch that return the `LossSpec` of a role."""

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
    """Return the critic's loss on the `returns` [T] of the tokens in the loss; see `value_loss`."""
    del context
    mask = minibatch["loss_mask"]
    spread = minibatch["returns"][mask].double().var(correction=0) if bool(mask.any()) else torch.zeros(())
    batch = minibatch.with_tokens(return_variance=torch.full_like(minibatch["returns"], float(spread)))
    return LossSpec(CRITIC.name, batch, ("values",), partial(value_loss, clip=clip))


def value_loss(batch: PackedBatch, outputs: Mapping[str, torch.Tensor], *, clip: float | None) -> LossResult:
    """Return Σ w_t max(½ (V - R)², ½ (V_old + clip(V - V_old, -c, c) - R)²), with w the update's `loss_weights`.

    The clipping is that of OpenAI Baselines' PPO. The paper (arXiv 1707.06347, equation 9) has only (V - R)², twice the
    loss here without clipping.

    Args:
        batch: with `returns`, `loss_weights`, `loss_mask` and, for clipping, `values` (V_old); each [T].
        outputs: `values` [T] with gradients.
        clip: c, the distance from V_old up to which values are moved by the updates on one batch; None: no bound.

    Returns:
        The sum, and means over the tokens in the loss: `value_loss`, `value_clip_fraction` (tokens whose gradient is
        clipped away) and `explained_variance`. The last one is 1 - (V - R)² / var R with the variance over the whole
        update, so that it is a plain mean and adds up over micro-batches. It is 1 for a perfect critic and 0 for one
        that knows only the mean; a constant error lowers it.
    """
    mask = batch["loss_mask"]
    # Values outside the mask may be infinite: replace them before computing, or gradients become NaN.
    values, returns = torch.where(mask, outputs["values"], 0.0), torch.where(mask, batch["returns"], 0.0)
    error = (values - returns).square()
    losses, is_clipped = error / 2, torch.zeros_like(mask)
    if clip is not None:
        old = torch.where(mask, batch["values"], 0.0)
        # `clamp` keeps values within the bounds bit for bit, so that they do not count as clipped.
        bounded = (values.clamp(old - clip, old + clip) - returns).square() / 2
        is_clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    variance = batch["return_variance"]
    explained = torch.where(variance > 0, 1 - error / variance, 0.0)
    logged = {"value_loss": losses, "value_clip_fraction": is_clipped.float(), "explained_variance": explained}
    metrics = {name: Metric.mean(value, mask) for name, value in logged.items()}
    return LossResult((losses * torch.where(mask, batch["loss_weights"], 0.0)).sum(), metrics)
