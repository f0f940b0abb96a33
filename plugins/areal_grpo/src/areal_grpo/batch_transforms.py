"""Batch transforms: columns computed from a whole batch before its advantages. Functions of batch and context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.sdk import Context

COEFFICIENT = "kl_in_reward/coefficient"
"""Where the adaptive coefficient stands in the state that a checkpoint holds."""
LARGEST_ERROR = 0.2
"""Of the KL, relative to its target: farther off the coefficient moves no faster (arXiv 1909.08593, section 2.2)."""


def kl_in_reward(
    batch: PackedBatch, context: Context, *, coefficient: float, target: float | None, horizon: int
) -> dict[str, torch.Tensor]:
    """Adds -β (log π_prox - log reference) to the reward of every token in the loss (Ziegler et al., arXiv 1909.08593,
    equation 2).

    It is the plainest estimate of KL(π_prox ‖ reference), k1: right in the mean also as a reward, where the others are
    not. With a target the KL of an episode, that is its sum over an episode's tokens, is led there: after each batch
    β ← β (1 + clip(KL / target - 1, -0.2, 0.2) E / horizon), for E episodes in the batch. The paper has a constant in
    the place of E / horizon, and its code this. The first β is `coefficient`; a checkpoint keeps the present one.

    Args:
        batch: with `proximal_logprobs` and `reference_logprobs` [T] float32, and `token_rewards` [T] where there are.
        context: of the trainer.
        coefficient: β, or the first one.
        target: nats per episode; None leaves β as it is.
        horizon: episodes; over so many β follows its error once.

    Returns:
        `token_rewards` [T], 0 for tokens out of the loss.
    """
    mask = batch["loss_mask"]
    divergence = torch.where(mask, batch["proximal_logprobs"] - batch["reference_logprobs"], 0.0)
    episodes = len(torch.unique(batch["episode_id"]))
    for_each = float(divergence.double().sum()) / episodes
    if target is not None:
        beginning = torch.tensor(coefficient, dtype=torch.float64)
        coefficient = float(context.state.get(COEFFICIENT, beginning))
        error = min(max(for_each / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        context.state[COEFFICIENT] = beginning.new_tensor(coefficient * (1 + error * episodes / horizon))
    context.log("reward_kl", Metric.mean(divergence, mask))
    context.log("reward_kl_episode", Metric.mean(for_each))
    context.log("reward_kl_coefficient", Metric.mean(coefficient))
    before = batch.get("token_rewards")
    earned = torch.zeros_like(divergence) if before is None else torch.where(mask, before, 0.0)
    return {"token_rewards": earned - coefficient * divergence}


def reward_scaling(
    batch: PackedBatch, context: Context, *, shift: float, scale: float, clip: float | None
) -> dict[str, torch.Tensor]:
    """R ← clip((R + shift) scale, -clip, clip), the whole episode's `reward`; rewards of turns and tokens stay.

    What is logged, and what filters see, is the reward before. With rewards by turn the difference is earned by the
    episode's last action.

    Args:
        batch: with `reward` [B].
        context: of the trainer.
        shift: added first, in the unit of the reward.
        scale: multiplied then.
        clip: the largest amount left; None leaves all.

    Returns:
        `reward` [B].
    """
    del context
    reward = (batch["reward"] + shift) * scale
    return {"reward": reward if clip is None else reward.clamp(-clip, clip)}
