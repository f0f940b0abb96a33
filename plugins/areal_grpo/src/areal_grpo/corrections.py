"""Corrections for tokens that another policy than π_prox has sampled: older weights, or an engine with other rounding.

Each returns importance weights w [T] float32 without gradients, or a mask [T] bool, computed from
ρ_t = π_prox(y_t) / μ(y_t), where μ is the policy that sampled token t, as the inference engine reported it. A masked
token has no policy loss, but keeps its regularizers and counts in denominators. `ipo_mask` alone compares μ with the
current policy π. The corrections of `sequence_corrections` treat a whole sequence as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import bernoulli_kl, probability_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def token_truncate(terms: PolicyTerms, *, cap: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return w_t = min(ρ_t, cap): token-level truncated importance sampling (as in IMPALA, arXiv 1802.01561).

    Even without a cap it is biased: it ignores that the text before the token comes from μ, too.

    Returns:
        The weights, and `behavior_weight` (the weights) and `truncated_fraction` (tokens over the cap).
    """
    ratio = _behavior_ratio(terms)
    weights = ratio.clamp(max=cap)
    return weights, {"behavior_weight": weights, "truncated_fraction": (ratio > cap).float()}


def token_mask(terms: PolicyTerms, *, low: float, high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return w_t = ρ_t if low <= ρ_t <= high, else 0 (IcePop; Ring-1T, arXiv 2510.18855).

    These are weights: where they are 0, the token's regularizers are gone as well as its policy loss.

    Returns:
        The weights, and `behavior_weight` (the weights) and `masked_fraction` (tokens out of bounds).
    """
    ratio = _behavior_ratio(terms)
    inside = (ratio >= low) & (ratio <= high)
    weights = torch.where(inside, ratio, 0.0)
    return weights, {"behavior_weight": weights, "masked_fraction": (~inside).float()}


def kpop(terms: PolicyTerms, *, threshold: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return w_t = ρ_t if max(KL_B(π_prox ‖ μ), KL_B(μ ‖ π_prox)) <= threshold, else 0 (KPop).

    KL_B is the divergence of the Bernoulli distributions of whether a policy samples this token. Kept tokens are
    weighted by ρ_t without a cap, as in AReaL (`binary_kl` with the action `mask`) and prime-rl, so do not combine it
    with `token_truncate`. A rare token may pass with a weight of hundreds: watch `train/effective_sample_share`, and
    lower the threshold. That of AReaL's example is 2.0, KPop's own 0.1. As with `token_mask`, a weight of 0 also
    removes the token's regularizers.

    Returns:
        The weights, and `behavior_weight` (the weights) and `kpop_masked_fraction` (tokens over the threshold).
    """
    proximal, behavior, mask = terms.proximal_logprobs, terms.behavior_logprobs, terms.mask
    distance = torch.maximum(bernoulli_kl(proximal, behavior, mask), bernoulli_kl(behavior, proximal, mask))
    is_over = distance > threshold
    weights = torch.where(is_over, 0.0, _behavior_ratio(terms))
    return weights, {"behavior_weight": weights, "kpop_masked_fraction": is_over.float()}


def ipo_mask(terms: PolicyTerms, *, threshold: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keep the tokens with |π(y_t) - μ(y_t)| <= threshold: the trust region of IPO (INTELLECT policy optimization,
    prime-rl's default loss; no paper).

    π is the *current* policy, so the mask also follows the updates on this batch. It ignores the advantage's sign,
    where `dppo` masks only steps away from μ. prime-rl multiplies kept tokens by π / μ without a cap: `policy_loss:
    {type: rollout_importance, clip_low: null, clip_high: null}`. This mask is not the preference loss `ipo`.

    Args:
        terms: [T], with log-probabilities in nats.
        threshold: Largest difference of the two probabilities, from 0 to 1.

    Returns:
        The mask, [T] bool, and `ipo_masked_fraction` (tokens over the threshold).

    Example:
        >>> import torch
        >>> from areal_core.sdk import PolicyTerms
        >>> policy, sampler = torch.tensor([0.9, 0.5, 2e-4]).log(), torch.tensor([0.5, 0.4, 1e-4]).log()
        >>> ones, rows = torch.ones(3), torch.zeros(3, dtype=torch.int64)
        >>> terms = PolicyTerms(policy, policy, sampler, ones, ones.bool(), rows, rows=1)
        >>> ipo_mask(terms, threshold=0.3)[0]
        tensor([False,  True,  True])
    """
    current, behavior = (
        torch.where(terms.mask, logprobs.detach(), 0.0).exp() for logprobs in (terms.logprobs, terms.behavior_logprobs)
    )
    is_over = (current - behavior).abs() > threshold
    return ~is_over, {"ipo_masked_fraction": is_over.float()}


def _behavior_ratio(terms: PolicyTerms) -> torch.Tensor:
    return probability_ratio(terms.proximal_logprobs.detach(), terms.behavior_logprobs, terms.mask)
