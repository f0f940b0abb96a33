"""Ratios of probabilities that can neither overflow nor carry what stands outside the mask into a gradient."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut to ± this: e^20 is 4.9e8, beyond anything that clipping or a cap leaves as it is."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator - denominator, cut to ±20; 0 where the mask is off.

    Outside the mask log-probabilities may be anything. They are replaced at once, because an infinity that is only
    masked after an exponential still makes the gradient NaN.

    Args:
        numerator, denominator: [T] float32, log-probabilities.
        mask: [T] bool.

    Returns:
        [T] float32; where the difference was cut, its gradient is 0.
    """
    return torch.where(mask, numerator - denominator, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def probability_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp of `log_ratio`: 1 where the mask is off. Arguments and result as there."""
    return log_ratio(numerator, denominator, mask).exp()


def bernoulli_kl(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(p) ‖ Bernoulli(q)): of two policies that are asked only whether they write this token.

    p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q)), which is never above the KL of the whole distributions.

    Args:
        logprobs: [T], log p.
        others: [T], log q.
        mask: [T] bool.

    Returns:
        [T] without gradients, 0 where the mask is off. A complement below e^-20 counts as e^-20.
    """
    first, second = (torch.where(mask, each.detach(), -1.0) for each in (logprobs, others))
    rests = [(-torch.expm1(each)).clamp(min=0).log().clamp(min=-LOG_RATIO_BOUND) for each in (first, second)]
    difference = (first - second).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return first.exp() * difference + rests[0].exp() * (rests[0] - rests[1])


def clip_shares(clipped: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a loss that clips logs: the share of tokens that are clipped, and its two parts by the advantage's sign.

    Each is averaged over all tokens in the loss, so that the two parts add up to the whole; a token without an
    advantage is in neither.

    Args:
        clipped: [T] bool.
        advantages: [T].
    """
    return {
        "clip_fraction": clipped.float(),
        "clip_fraction_positive": (clipped & (advantages > 0)).float(),
        "clip_fraction_negative": (clipped & (advantages < 0)).float(),
    }
