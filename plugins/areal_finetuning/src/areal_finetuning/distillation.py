"""On-policy distillation: a policy learns from what a teacher says of the policy's own tokens; flat [T] in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.interfaces import PolicyTerms


def teacher_kl(batch: PackedBatch, *, coefficient: float) -> torch.Tensor:
    """A_t = -c (log π_prox(y_t) - log π_teacher(y_t)), an estimate of -c KL(π_prox ‖ π_teacher) from one token.

    For a token that π itself has sampled E[A_t ∇ log π(y_t)] = -c ∇ KL(π ‖ π_teacher), the reverse KL behind the text
    before it (on-policy distillation, arXiv 2306.13649). Rewards do not count.

    Args:
        batch: with `proximal_logprobs` and `teacher_logprobs`, [T].
        coefficient: c.

    Returns:
        [T], 0 outside `loss_mask`.
    """
    difference = batch["teacher_logprobs"] - batch["proximal_logprobs"]
    return coefficient * torch.where(batch["loss_mask"], difference, 0.0)


def distillation(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -A log π(y_t), for one update a batch (Williams, "Simple statistical gradient-following algorithms", 1992).

    With several updates choose a loss that clips, such as `grpo/ppo_clip`.

    Returns:
        The loss, and `teacher_kl`, log π - log π_teacher: its mean estimates KL(π ‖ π_teacher) in nats per token.
    """
    difference = terms.logprobs.detach() - terms.columns["teacher_logprobs"]
    return -terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0), {"teacher_kl": difference}
