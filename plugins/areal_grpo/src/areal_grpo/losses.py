"""Losses of tokens: pure functions of `PolicyTerms`, flat [T] in and out. What they log is averaged over the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import probability_ratio

if TYPE_CHECKING:
    from areal_core.interfaces.algorithm import PolicyTerms


def ppo_clip(
    terms: PolicyTerms, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = π / π_prox (PPO, arXiv 1707.06347, equation 7).

    The ratio is to the proximal policy, whoever sampled the token: clipping is decoupled from the correction for
    stale data (arXiv 2110.00641; AReaL, arXiv 2505.24298). Bounds of their own for each side are DAPO's
    (arXiv 2503.14476). For A < 0 `dual_clip` c gives min(L_t, c |A|) (arXiv 1912.09729).

    Returns:
        The loss, and `ratio`, `clip_fraction` (tokens on which clipping takes the gradient away) and, with
        `dual_clip`, `dual_clip_fraction`.
    """
    ratio = probability_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    advantages = terms.advantages
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    logged = {"ratio": ratio.detach(), "clip_fraction": (clipped > plain).float()}
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        logged["dual_clip_fraction"] = over.float()
    return loss, logged


def reinforce(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -A log π(y_t) (Williams, "Simple statistical gradient-following algorithms", 1992).

    It knows no ratio: from the second update on a batch the samples are no longer the policy's own, and the gradient
    is biased. With several updates use `ppo_clip`.
    """
    return -terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0), {}
