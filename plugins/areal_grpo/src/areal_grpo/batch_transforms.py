"""Batch transforms: functions of batch and context that compute columns of a whole batch before its advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.sdk import Context

COEFFICIENT = "kl_in_reward/coefficient"
"""Key of the adaptive coefficient in the algorithm's state, which checkpoints contain."""
MAX_ERROR = 0.2
"""Bound of the relative error of the KL; beyond it the coefficient changes no faster (arXiv 1909.08593, 2.2)."""


def kl_in_reward(
    batch: PackedBatch, context: Context, *, coefficient: float, target: float | None, horizon: int
) -> dict[str, torch.Tensor]:
    """Add -β (log π_prox - log reference) to the reward of every token in the loss (Ziegler et al., arXiv 1909.08593,
    equation 2).

    This is the estimate k1 of KL(π_prox ‖ reference), the only common one whose gradient is right in a reward. With an
    advantage that divides by the group's deviation (`group_normalized`, `gigpo`), β loses its meaning: a group whose
    answers earn the same learns the KL at full strength. Use `reference_kl`, or another advantage. With a
    target, β adapts so that the KL of an episode (summed over its tokens) approaches the target. After each batch of E
    episodes, β ← β (1 + clip(KL / target - 1, -0.2, 0.2) E / horizon). The paper has a constant instead of E / horizon;
    its code has E / horizon. Checkpoints contain the current β.

    Args:
        batch: with `proximal_logprobs` and `reference_logprobs` [T] float32, and `token_rewards` [T] if there are any.
        context: context of the trainer.
        coefficient: β, or its initial value.
        target: KL per episode in nats; None: β is fixed.
        horizon: number of episodes over which β adapts.

    Returns:
        `token_rewards` [T], 0 for tokens out of the loss.
    """
    mask = batch["loss_mask"]
    divergence = torch.where(mask, batch["proximal_logprobs"] - batch["reference_logprobs"], 0.0)
    episodes = len(torch.unique(batch["episode_id"]))
    per_episode = float(divergence.double().sum()) / episodes
    if target is not None:
        initial = torch.tensor(coefficient, dtype=torch.float64)
        coefficient = float(context.state.get(COEFFICIENT, initial))
        error = min(max(per_episode / target - 1, -MAX_ERROR), MAX_ERROR)
        context.state[COEFFICIENT] = initial.new_tensor(coefficient * (1 + error * episodes / horizon))
    context.log("reward_kl", Metric.mean(divergence, mask))
    context.log("reward_kl_episode", Metric.mean(per_episode))
    context.log("reward_kl_coefficient", Metric.mean(coefficient))
    previous = batch.get("token_rewards")
    rewards = torch.zeros_like(divergence) if previous is None else torch.where(mask, previous, 0.0)
    return {"token_rewards": rewards - coefficient * divergence}


def reward_scaling(
    batch: PackedBatch, context: Context, *, shift: float, scale: float, clip: float | None
) -> dict[str, torch.Tensor]:
    """Change the `reward` of episodes: R ← clip((R + shift) scale, -clip, clip). Rewards of turns and tokens stay.

    Logs and filters see the reward before this. With rewards by turn, the episode's last action earns the difference.

    Args:
        batch: with `reward` [B].
        context: context of the trainer.
        shift: amount that is added first, in units of the reward.
        scale: factor that is applied next.
        clip: maximum absolute value of the result; None: no clipping.

    Returns:
        `reward` [B].
    """
    del context
    reward = (batch["reward"] + shift) * scale
    return {"reward": reward if clip is None else reward.clamp(-clip, clip)}
