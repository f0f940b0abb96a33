"""Two parts of an algorithm: pure functions of packed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import group_mean

if TYPE_CHECKING:
    from areal_core.data import PackedBatch
    from areal_core.interfaces import PolicyTerms


def better_or_worse(batch: PackedBatch, *, margin: float) -> torch.Tensor:
    """A_i = sign(R_i - mean_j R_j), and 0 where the difference is within `margin`; [B] float32."""
    rewards = batch["reward"].double()
    difference = rewards - group_mean(batch, rewards)
    return torch.where(difference.abs() > margin, difference.sign(), 0.0).float()


def capped_reinforce(terms: PolicyTerms, *, cap: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -min(r_t, cap) A log π(y_t), no gradient through r_t = π / π_prox (CISPO, arXiv 2506.13585); [T]."""
    ratio = torch.exp(terms.logprobs.detach() - terms.proximal_logprobs)
    losses = -ratio.clamp(max=cap) * terms.advantages * terms.logprobs
    return losses, {"capped_fraction": (ratio > cap).float()}
