"""Probability ratios that cannot overflow, and that keep values outside the mask out of gradients."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this. e^20 is 4.9e8, far above any clip range or cap."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return numerator - denominator, clamped to ±20, and 0 outside the mask.

    Log-probabilities outside the mask may be infinite. They are replaced before the exponential, because masking an
    infinity after it still makes the gradient NaN.

    Args:
        numerator, denominator: [T] float32, log-probabilities.
        mask: [T] bool.

    Returns:
        [T] float32. The gradient is 0 where the difference was clamped.
    """
    return torch.where(mask, numerator - denominator, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def probability_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return exp of `log_ratio`, 1 outside the mask. Arguments and result are those of `log_ratio`."""
    return log_ratio(numerator, denominator, mask).exp()


def bernoulli_kl(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return KL(Bernoulli(p) ‖ Bernoulli(q)) of whether two policies sample this token.

    p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q)), which is never above the KL of the whole distributions.

    Args:
        logprobs: [T], log p.
        others: [T], log q.
        mask: [T] bool.

    Returns:
        [T] without gradients, 0 outside the mask. A complement below e^-20 counts as e^-20.
    """
    first, second = (torch.where(mask, values.detach(), -1.0) for values in (logprobs, others))
    rests = [(-torch.expm1(values)).clamp(min=0).log().clamp(min=-LOG_RATIO_BOUND) for values in (first, second)]
    difference = (first - second).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return first.exp() * difference + rests[0].exp() * (rests[0] - rests[1])


def clip_shares(clipped: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logged values of a loss that clips: clipped tokens, in all and by the advantage's sign.

    Each is averaged over all tokens in the loss, so that the two parts add up to the whole. A token with an advantage
    of 0 is in neither part.

    Args:
        clipped: [T] bool.
        advantages: [T].
    """
    return {
        "clip_fraction": clipped.float(),
        "clip_fraction_positive": (clipped & (advantages > 0)).float(),
        "clip_fraction_negative": (clipped & (advantages < 0)).float(),
    }
