"""Losses -w A log π with a weight w that has no gradient: pure functions of `PolicyTerms`, flat [T] in and out.

Clipping bounds the weight w, or sets it to 0 on purpose; it never removes only the gradient of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import bernoulli_kl, clip_shares, probability_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def cispo(terms: PolicyTerms, *, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -w A log π with w = clip(r, 1 - clip_low, 1 + clip_high), r = π / π_prox (CISPO; MiniMax-M1, arXiv
    2506.13585).

    `clip_high` counts from 1, as in `ppo_clip`; some programs use that name for the largest weight itself.

    Returns:
        The loss, and `ratio`, and the clip fractions of `ppo_clip`: here of tokens whose weight is clipped.
    """
    ratio = probability_ratio(terms.logprobs.detach(), terms.proximal_logprobs, terms.mask)
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    return _weighted(terms, weights), {"ratio": ratio, **clip_shares(weights != ratio, terms.advantages)}


def dppo(
    terms: PolicyTerms, *, divergence: str, threshold_low: float, threshold_high: float, cap: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -w A log π with w = min(r, cap), r = π / μ, or 0 if a step would leave the trust region (DPPO, arXiv
    2602.04879).

    A token leaves it if its divergence is over the threshold and the gradient would increase it: for A > 0 if r > 1,
    with `threshold_high`; for A < 0 if r < 1, with `threshold_low`. The divergence is estimated from the sampled token
    alone: `tv` is |π - μ|, `kl` is KL(Bernoulli(μ) ‖ Bernoulli(π)). A ratio of 2 from 0.0001 to 0.0002 is a small
    divergence in both, so rare tokens are not clipped as in PPO.

    Returns:
        The loss, and `ratio`, and the clip fractions of `ppo_clip`: here of tokens whose weight is 0.
    """
    current = terms.logprobs.detach()
    ratio = probability_ratio(current, terms.behavior_logprobs, terms.mask)
    if divergence == "kl":
        distance = bernoulli_kl(terms.behavior_logprobs, current, terms.mask)
    else:
        now, then = (torch.where(terms.mask, logprobs, 0.0).exp() for logprobs in (current, terms.behavior_logprobs))
        distance = (now - then).abs()
    leaves_above = (terms.advantages > 0) & (ratio > 1) & (distance > threshold_high)
    leaves_below = (terms.advantages < 0) & (ratio < 1) & (distance > threshold_low)
    weights = torch.where(leaves_above | leaves_below, 0.0, ratio.clamp(max=cap))
    return _weighted(terms, weights), {"ratio": ratio, **clip_shares(leaves_above | leaves_below, terms.advantages)}


def rollout_importance(
    terms: PolicyTerms, *, clip_low: float | None, clip_high: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -w A log π with w = r if 1 - clip_low < r < 1 + clip_high, else 0; r = π / μ (as in the report of GLM-5,
    2026).

    The policy that sampled is both the target of the correction and the center of the bounds, so no proximal policy is
    needed. None is no bound; without both bounds the loss is plain importance sampling.

    Returns:
        The loss, and `ratio`, and the clip fractions of `ppo_clip`: here of tokens whose weight is 0, on either side.
    """
    ratio = probability_ratio(terms.logprobs.detach(), terms.behavior_logprobs, terms.mask)
    outside = torch.zeros_like(terms.mask)
    if clip_low is not None:
        outside |= ratio <= 1 - clip_low
    if clip_high is not None:
        outside |= ratio >= 1 + clip_high
    weights = torch.where(outside, 0.0, ratio)
    return _weighted(terms, weights), {"ratio": ratio, **clip_shares(outside, terms.advantages)}


def _weighted(terms: PolicyTerms, weights: torch.Tensor) -> torch.Tensor:
    return -weights * terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0)
