"""Distillation of a teacher into a policy, from sampled tokens or from whole distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_core.sdk import LossResult
from areal_finetuning.config import TEACHER
from areal_finetuning.supervised import Supervised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.sdk import PolicyTerms
    from areal_finetuning.config import GKDSettings


def teacher_kl(batch: PackedBatch, *, coefficient: float) -> torch.Tensor:
    """Return A_t = -c (log π_prox(y_t) - log π_teacher(y_t)), an estimate of -c KL(π_prox ‖ π_teacher) from one token.

    For a token that π itself has sampled, E[A_t ∇ log π(y_t)] = -c ∇ KL(π ‖ π_teacher), the reverse KL given the text
    before it (on-policy distillation, arXiv 2306.13649). Rewards are not used.

    Args:
        batch: with `proximal_logprobs` and `teacher_logprobs`, [T].
        coefficient: c.

    Returns:
        [T], 0 outside `loss_mask`.
    """
    difference = batch["teacher_logprobs"] - batch["proximal_logprobs"]
    return coefficient * torch.where(batch["loss_mask"], difference, 0.0)


def distillation(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -A log π(y_t) (Williams, "Simple statistical gradient-following algorithms", 1992).

    It is meant for one update per batch. With several updates choose a loss that clips, such as `grpo/ppo_clip`.

    Returns:
        The loss, and `teacher_kl`, log π - log π_teacher: its mean estimates KL(π ‖ π_teacher) in nats per token.
    """
    difference = terms.logprobs.detach() - terms.columns["teacher_logprobs"]
    return -terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0), {"teacher_kl": difference}


class GeneralizedDistillation(Supervised):
    """An `Algorithm` that learns the teacher's whole distribution: L = Σ_t w_t D_β(teacher, π).

    D_β is the generalized Jensen-Shannon divergence, which the training engine computes from both models' logits (GKD,
    arXiv 2306.13649, equations 1 and 4); no gradient flows through the sampling.
    """

    def __init__(self, settings: GKDSettings) -> None:
        super().__init__(settings)
        self.outputs = (f"divergence:{TEACHER.name}:{settings.beta}",)

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch."""
        divergence = torch.where(batch["loss_mask"], outputs[self.outputs[0]], 0.0)
        mean = Metric.mean(divergence, batch["loss_mask"])
        return LossResult((divergence * batch["loss_weights"]).sum(), {"teacher_divergence": mean})
