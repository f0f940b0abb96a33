"""Token losses with one ratio for each token: pure functions of `PolicyTerms`, flat [T] in and out.

The values that a loss logs are averaged over the mask. `sequence_losses` has the losses with one ratio for a sequence,
`weighted_losses` those in which the ratio is a weight without a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import clip_shares, probability_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def ppo_clip(
    terms: PolicyTerms, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = π / π_prox (PPO, arXiv 1707.06347, eq. 7).

    The ratio is to the proximal policy, whichever policy sampled the token: clipping is decoupled from the correction
    for stale data (arXiv 2110.00641; AReaL, arXiv 2505.24298). Separate bounds for each side are DAPO's
    (arXiv 2503.14476). For A < 0 `dual_clip` c gives min(L_t, c |A|) (arXiv 1912.09729).

    Returns:
        The loss, and `ratio`, `clip_fraction` (tokens whose gradient is clipped away), its parts
        `clip_fraction_positive` and `clip_fraction_negative` by the advantage's sign and, with `dual_clip`,
        `dual_clip_fraction`.
    """
    ratio = probability_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    advantages = terms.advantages
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    logged = {"ratio": ratio.detach(), **clip_shares(clipped > plain, advantages)}
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        logged["dual_clip_fraction"] = over.float()
    return loss, logged


def sapo(
    terms: PolicyTerms, *, temperature_positive: float, temperature_negative: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -(4 / τ) σ(τ (r - 1)) A, r = π / π_prox: a soft gate instead of clipping (SAPO, arXiv 2511.20347).

    τ is `temperature_positive` if A > 0, else `temperature_negative`. The gradient is that of -r A times the gate
    4 σ (1 - σ), which is 1 at r = 1 and fades on both sides, faster for higher τ.

    Returns:
        The loss, and `ratio` and `gate`.
    """
    ratio = probability_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    temperature = torch.full_like(ratio, temperature_negative)
    temperature = torch.where(terms.advantages > 0, temperature_positive, temperature)
    inner = torch.sigmoid(temperature * (ratio - 1))
    logged = {"ratio": ratio.detach(), "gate": (4 * inner * (1 - inner)).detach()}
    return -4 / temperature * inner * terms.advantages, logged


def reinforce(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -A log π(y_t) (Williams, "Simple statistical gradient-following algorithms", 1992).

    It has no ratio: from the second update on a batch, the samples are no longer the policy's own, so the gradient is
    biased. With several updates use `ppo_clip`.
    """
    return -terms.advantages * torch.where(terms.mask, terms.logprobs, 0.0), {}
