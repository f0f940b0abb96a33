"""Corrections for tokens that π_prox has not sampled: older weights have, or an engine that rounds otherwise.

Each returns weights [T] float32 without gradients, computed from ρ_t = π_prox(y_t) / μ(y_t), where μ is the policy that
sampled token t, as the inference engine reported it. Denominators stay as they are when a token is masked.
`sequence_corrections` has those that treat a whole sequence as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import bernoulli_kl, probability_ratio

if TYPE_CHECKING:
    from areal_core.interfaces.algorithm import PolicyTerms


def token_truncate(terms: PolicyTerms, *, cap: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """w_t = min(ρ_t, cap): token-level truncated importance sampling (as in IMPALA, arXiv 1802.01561).

    Returns:
        The weights, and `behavior_weight` (the weights) and `truncated_fraction` (tokens over the cap).
    """
    ratio = _behavior_ratio(terms)
    weights = ratio.clamp(max=cap)
    return weights, {"behavior_weight": weights, "truncated_fraction": (ratio > cap).float()}


def token_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """w_t = ρ_t where low <= ρ_t <= high, else 0 (IcePop; Ring-1T, arXiv 2510.18855).

    Returns:
        The weights, and `behavior_weight` (the weights) and `masked_fraction` (tokens out of bounds).
    """
    ratio = _behavior_ratio(terms)
    inside = (ratio >= low) & (ratio <= high)
    weights = torch.where(inside, ratio, 0.0)
    return weights, {"behavior_weight": weights, "masked_fraction": (~inside).float()}


def kpop(terms: PolicyTerms, *, threshold: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """w_t = 0 where max(KL_B(π_prox ‖ μ), KL_B(μ ‖ π_prox)) > threshold, else 1 (KPop, as AReaL has it).

    KL_B is the divergence of Bernoulli distributions: of the policies that are asked only whether they write the
    sampled token. It is a mask alone: w has no factor ρ.

    Returns:
        The weights, and `kpop_masked_fraction`.
    """
    proximal, behavior, mask = terms.proximal_logprobs, terms.behavior_logprobs, terms.mask
    distance = torch.maximum(bernoulli_kl(proximal, behavior, mask), bernoulli_kl(behavior, proximal, mask))
    over = distance > threshold
    return (~over).to(distance.dtype), {"kpop_masked_fraction": over.float()}


def _behavior_ratio(terms: PolicyTerms) -> torch.Tensor:
    return probability_ratio(terms.proximal_logprobs.detach(), terms.behavior_logprobs, terms.mask)
