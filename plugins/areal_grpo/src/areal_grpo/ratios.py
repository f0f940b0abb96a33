"""Ratios of probabilities that can neither overflow nor carry what stands outside the mask into a gradient."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut to ± this: e^20 is 4.9e8, beyond anything that clipping or a cap leaves as it is."""


def probability_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator), with the difference cut to ±20; 1 where the mask is off.

    Outside the mask log-probabilities may be anything. They are replaced before the exponential, because an infinity
    that is only masked after it still makes the gradient NaN.

    Args:
        numerator, denominator: [T] float32, log-probabilities.
        mask: [T] bool.

    Returns:
        [T] float32; where the difference was cut, its gradient is 0.
    """
    difference = torch.where(mask, numerator - denominator, 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
