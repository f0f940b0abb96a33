"""Corrections for whole sequences: the tokens of a sequence share one weight, or are kept or masked together.

A sequence is a trajectory: its tokens in the loss, from any number of turns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal_grpo.ratios import LOG_RATIO_BOUND, log_ratio

if TYPE_CHECKING:
    import torch

    from areal_core.sdk import PolicyTerms


def sequence_truncate(terms: PolicyTerms, *, cap: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return w = min(Π_t ρ_t, cap): truncated importance sampling of whole sequences.

    Without the cap it would be exact, because it is the ratio of the two policies' probabilities of the whole answer.
    Its variance grows with the length, so the cap applies to most long sequences.

    Returns:
        The weights, and `sequence_weight` (the weights) and `sequence_truncated_fraction` (tokens of sequences over
        the cap).
    """
    product = terms.row_sum(_log_ratio(terms)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[terms.row_index]
    weights = product.clamp(max=cap)
    return weights, {"sequence_weight": weights, "sequence_truncated_fraction": (product > cap).float()}


def geometric_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the sequences with low <= (Π_t ρ_t)^(1/T) <= high: the geometric mean of a sequence's T ratios.

    Unlike `product_mask` it measures the average distance per token, so it does not mask sequences for being long.

    Returns:
        The mask, and `geometric_masked_fraction` (tokens of masked sequences).
    """
    mean = terms.row_mean(_log_ratio(terms))
    outside = (mean < math.log(low)) | (mean > math.log(high))
    return _dropped(terms, outside, "geometric_masked_fraction")


def product_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the sequences with low <= Π_t ρ_t <= high.

    Returns:
        The mask, and `product_masked_fraction` (tokens of masked sequences).
    """
    total = terms.row_sum(_log_ratio(terms))
    outside = (total < math.log(low)) | (total > math.log(high))
    return _dropped(terms, outside, "product_masked_fraction")


def veto(terms: PolicyTerms, *, low: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mask a sequence if any ρ_t is below `low`: it has a token that is far less likely under π_prox than under μ.

    Returns:
        The mask, and `vetoed_fraction` (tokens of masked sequences).
    """
    impossible = _log_ratio(terms) < math.log(low)
    return _dropped(terms, terms.row_sum(impossible.float()) > 0, "vetoed_fraction")


def opsm(terms: PolicyTerms, *, threshold: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mask tokens with A < 0 in sequences with mean_t(log μ - log π) > threshold: off-policy sequence masking
    (DeepSeek-V3.2, arXiv 2512.02556).

    The mean over a sequence's tokens is from the policy that sampled, as its engine reported it, to the *current*
    policy π, as in the paper. So it includes stale weights, the engine's rounding and the updates on this batch.
    Programs that compare with π_prox measure only a part of it and use thresholds that are smaller by orders of
    magnitude. As in TRL, slime and DeepSeek's objective, a penalty such as `reference_kl` still applies to masked
    tokens.

    Returns:
        The mask, and `opsm_masked_fraction`.
    """
    distance = terms.row_mean(log_ratio(terms.behavior_logprobs, terms.logprobs.detach(), terms.mask))
    is_over = (distance > threshold)[terms.row_index] & (terms.advantages < 0)
    return ~is_over, {"opsm_masked_fraction": is_over.float()}


def _log_ratio(terms: PolicyTerms) -> torch.Tensor:
    return log_ratio(terms.proximal_logprobs.detach(), terms.behavior_logprobs, terms.mask)


def _dropped(terms: PolicyTerms, rows: torch.Tensor, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mask [T] without the sequences in `rows` [rows] bool, and the masked share as `name`."""
    dropped = rows[terms.row_index]
    return ~dropped, {name: dropped.float()}
