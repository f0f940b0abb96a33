"""Score centering: a policy gradient without drift towards the policy that sampled. A pure function of `PolicyTerms`.

Where the policy π differs from the policy μ that sampled, the expected update at each position is
E_μ[A] E_μ[∇ log π] + Cov_μ(A, ∇ log π). Its first term teaches π to imitate μ, and E_μ[∇ log π] is 0 only if π = μ.
Score centering subtracts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import LOG_RATIO_BOUND, log_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms

SMALLEST_TAIL = 1e-6
"""Lower bound of π's probability of all other tokens. Below it, rounding errors of float32 would be scaled up."""


def score_centering(terms: PolicyTerms, *, cap: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -A (w_y log π(y) - Σ_v c_v log π(v)), whose gradient is -A (w_y ∇log π(y) - E_{v~μ}[w_v ∇log π(v)])
    (score centering, Marek and Ryabinin, arXiv 2609.20807).

    The weights w = min(π / μ, cap) and the coefficients c have no gradient. Without a cap w = 1, and no ratio of the
    two policies occurs. With one, the weighted score is centered, as in the paper: truncated importance sampling
    outside of this loss would not do that.

    v runs over the head: the K tokens that were likeliest under μ. Outside of it μ is assumed to be proportional to π,
    with the right sum: μ(v) = α π(v), α = (1 - Σ_head μ) / (1 - Σ_head π). Because Σ_v π(v) ∇log π(v) = 0 over all
    tokens, the tail needs no log-probabilities of its own: c_v = μ(v) w_v - α w_tail π(v), with w_tail = min(1 / α,
    cap), or 1 without a cap. With a head of the whole vocabulary this is exact.

    Without a cap there is no importance weight: the drift is removed, and nothing else is corrected. Set `cap` for
    stale data. Nothing is clipped in either case, so prefer one update a batch.

    A correction that only masks may be combined with it. A mask of whole sequences, such as `geometric_mask`, keeps the
    rest centered; a mask of tokens does so only approximately.

    Args:
        terms: [T], and [T, K] for `top_logprobs` and `behavior_top_logprobs`; log-probabilities in nats.
        cap: Largest importance weight. None: all weights are 1.

    Returns:
        The loss [T], and `top_mass` (μ's probability of the head) and, with a cap, `behavior_weight` (w of the sampled
        token) and `truncated_fraction` (tokens over the cap).

    Example:
        >>> import torch
        >>> from areal_core.sdk import PolicyTerms
        >>> policy = torch.tensor([[0.5, 0.3, 0.2]]).log().requires_grad_()  # all three tokens of a vocabulary
        >>> sampler = torch.tensor([[0.6, 0.3, 0.1]]).log()
        >>> taken, ones, row = policy[:, 0], torch.ones(1), torch.tensor([0])
        >>> tops = {"top_logprobs": policy, "behavior_top_logprobs": sampler}
        >>> terms = PolicyTerms(taken, taken.detach(), sampler[:, 0], ones, ones.bool(), row, rows=1, **tops)
        >>> loss, _ = score_centering(terms, cap=None)
        >>> torch.autograd.grad(loss.sum(), policy)[0]  # by log π: μ(v), minus 1 for the token that was sampled
        tensor([[-0.4000,  0.3000,  0.1000]])
    """
    assert terms.top_logprobs is not None, "the settings of a component must have needs_top_logprobs"
    assert terms.behavior_top_logprobs is not None
    inside = terms.mask[:, None]
    head = torch.where(inside, terms.top_logprobs, -LOG_RATIO_BOUND)
    log_policy = head.detach()
    log_sampler = torch.where(inside, terms.behavior_top_logprobs, -LOG_RATIO_BOUND)
    policy, sampler = log_policy.exp(), log_sampler.exp()
    top_mass = sampler.sum(-1)
    scale = (1 - top_mass).clamp(min=0) / (1 - policy.sum(-1)).clamp(min=SMALLEST_TAIL)
    tail = scale * _weights(-scale.log(), cap)
    coefficients = sampler * _weights(log_policy - log_sampler, cap) - tail[:, None] * policy
    expected = (coefficients * head).sum(-1)
    difference = log_ratio(terms.logprobs.detach(), terms.behavior_logprobs, terms.mask)
    weights = _weights(difference, cap)
    losses = -terms.advantages * (weights * torch.where(terms.mask, terms.logprobs, 0.0) - expected)
    logged = {"top_mass": top_mass}
    if cap is not None:
        logged |= {"behavior_weight": weights, "truncated_fraction": (difference.exp() > cap).float()}
    return losses, logged


def _weights(difference: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return min(exp(difference), cap) for log π - log μ, which may be infinite; 1 without a cap."""
    if cap is None:
        return torch.ones_like(difference)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
