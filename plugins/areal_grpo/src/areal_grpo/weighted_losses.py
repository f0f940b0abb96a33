"""Losses -w A log π with a weight w that has no gradient: pure functions of `PolicyTerms`, flat [T] in and out.

Clipping bounds the weight w, or sets it to 0 on purpose; it never removes only the gradient of a token. The weight of
`vespo` is one for the whole sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import LOG_RATIO_BOUND, bernoulli_kl, clip_shares, log_ratio, probability_ratio

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


def vespo(
    terms: PolicyTerms, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -φ(W) A log π with φ(W) = W^k exp(λ (1 - W)), W = Π_t π(y_t) / μ(y_t) of the whole sequence (VESPO, arXiv
    2602.10693; TRL's `loss_type: vespo`).

    φ is 1 on policy and fades on both sides of W = k / λ: a higher k suppresses sequences that the policy has left, a
    higher λ those that it has moved towards. k and λ follow the sign of the token's advantage; 0 counts as positive.
    log W is the sum of log-ratios without division by the length, clamped to ±20: on long answers a small mismatch of
    each token is enough for a weight near 0, which `train/gate` shows.

    W is to the policy that sampled, as in the paper, so no proximal policy is needed. TRL writes it as
    Π_t (π / π_prox) (π_prox / μ) and truncates the second factor of each token (at 3 by default), so the two are equal
    as long as no token is truncated. TRL and the authors average over all tokens: `loss_aggregation: token_mean`.

    Args:
        terms: [T], with log-probabilities in nats.
        k_positive, lambda_positive: k and λ of tokens with A >= 0.
        k_negative, lambda_negative: k and λ of tokens with A < 0.

    Returns:
        The loss, [T] with gradients, and `gate` (φ).

    Example:
        >>> import torch
        >>> from areal_core.sdk import PolicyTerms
        >>> policy, sampler = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.2, -0.8, -1.0])
        >>> rows, mask = torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
        >>> terms = PolicyTerms(policy, policy, sampler, torch.tensor([1.0, 1.0, -1.0]), mask, rows, rows=2)
        >>> losses, logged = vespo(terms, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)
        >>> logged["gate"]  # W is 1 for the first sequence, 1 / e for the second
        tensor([1.0000, 1.0000, 0.1763])
        >>> losses
        tensor([ 1.0000,  1.0000, -0.3525])
    """
    log_ratios = log_ratio(terms.logprobs.detach(), terms.behavior_logprobs, terms.mask)
    total = terms.row_sum(log_ratios).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[terms.row_index]
    is_negative = terms.advantages < 0
    power = torch.full_like(total, k_positive).masked_fill(is_negative, k_negative)
    decay = torch.full_like(total, lambda_positive).masked_fill(is_negative, lambda_negative)
    weights = (power * total - decay * torch.expm1(total)).exp()
    return _weighted(terms, weights), {"gate": weights}


def _weighted(terms: PolicyTerms, weights: torch.Tensor) -> torch.Tensor:
    return -weights * terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0)
