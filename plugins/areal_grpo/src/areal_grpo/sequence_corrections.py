"""Corrections that treat a sequence as one: its tokens share one weight, or are kept or dropped together.

A sequence is a trajectory: its tokens in the loss, whatever number of turns they belong to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal_grpo.ratios import LOG_RATIO_BOUND, log_ratio

if TYPE_CHECKING:
    import torch

    from areal_core.sdk import PolicyTerms


def sequence_truncate(terms: PolicyTerms, *, cap: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """w = min(Π_t ρ_t, cap): truncated importance sampling of whole sequences.

    Without the cap it would be exact: it is the ratio of the two policies' probabilities of the whole answer. Its
    variance grows with the length of sequences, so that the cap decides for long ones.

    Returns:
        The weights, and `sequence_weight` (the weights) and `sequence_truncated_fraction` (tokens of sequences over
        the cap).
    """
    product = terms.row_sum(_log_ratio(terms)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[terms.row_index]
    weights = product.clamp(max=cap)
    return weights, {"sequence_weight": weights, "sequence_truncated_fraction": (product > cap).float()}


def geometric_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the sequences with low <= (Π_t ρ_t)^(1/T) <= high: the geometric mean of a sequence's T ratios.

    Unlike `product_mask` it measures the distance of one token, so that long sequences are not dropped for being long.

    Returns:
        The mask, and `geometric_masked_fraction` (tokens of dropped sequences).
    """
    mean = terms.row_mean(_log_ratio(terms))
    outside = (mean < math.log(low)) | (mean > math.log(high))
    return _dropped(terms, outside, "geometric_masked_fraction")


def product_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the sequences with low <= Π_t ρ_t <= high.

    Returns:
        The mask, and `product_masked_fraction` (tokens of dropped sequences).
    """
    total = terms.row_sum(_log_ratio(terms))
    outside = (total < math.log(low)) | (total > math.log(high))
    return _dropped(terms, outside, "product_masked_fraction")


def veto(terms: PolicyTerms, *, low: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Drop a sequence of which any ρ_t is below `low`: one token that π_prox would never write.

    Returns:
        The mask, and `vetoed_fraction` (tokens of dropped sequences).
    """
    impossible = _log_ratio(terms) < math.log(low)
    return _dropped(terms, terms.row_sum(impossible.float()) > 0, "vetoed_fraction")


def opsm(terms: PolicyTerms, *, threshold: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Drop tokens with A < 0 in sequences with mean_t(log μ - log π) > threshold: off-policy sequence masking.

    (DeepSeek-V3.2, arXiv 2512.02556.) The mean over a sequence's tokens is from the policy that sampled,
    as its engine reported it, to the *current* policy π, as in the paper: it sees stale weights, the engine's rounding
    and the updates on this batch together. Programs that compare with π_prox instead measure a part of it, and use
    thresholds that are smaller by orders of magnitude. As in TRL and slime, and as DeepSeek's objective has it, a
    penalty such as `reference_kl` stays on dropped tokens.

    Returns:
        The mask, and `opsm_masked_fraction`.
    """
    distance = terms.row_mean(log_ratio(terms.behavior_logprobs, terms.logprobs.detach(), terms.mask))
    over = (distance > threshold)[terms.row_index] & (terms.advantages < 0)
    return ~over, {"opsm_masked_fraction": over.float()}


def _log_ratio(terms: PolicyTerms) -> torch.Tensor:
    return log_ratio(terms.proximal_logprobs.detach(), terms.behavior_logprobs, terms.mask)


def _dropped(terms: PolicyTerms, rows: torch.Tensor, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mask that drops these sequences, `rows` [rows] bool."""
    dropped = rows[terms.row_index]
    return ~dropped, {name: dropped.float()}
