"""Regularizers: terms that are added to the loss of a token. Pure functions of `PolicyTerms`, flat [T] in and out.

In a loss only the gradient matters. Each docstring has the expected gradient for tokens that the policy itself has
sampled. The importance weights of corrections multiply these terms as they multiply the policy loss; masks of
corrections do not affect them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import LOG_RATIO_BOUND, probability_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def reference_kl(
    terms: PolicyTerms, *, coefficient: float, estimator: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return β times an estimate of KL(π ‖ reference) from one sample, with d = log π - log reference.

    - k2 = d² / 2: its expected gradient is that of KL(π ‖ reference), which seeks a mode of the reference.
    - k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence", 2020; GRPO, arXiv 2402.03300, equation 4): never
      negative; its expected gradient is that of KL(reference ‖ π), which covers the reference.
    - unbiased = r k3 with r = π / π_prox (DeepSeek-V3.2, arXiv 2512.02556): the ratio makes value and gradient those of
      KL(π ‖ reference) after further updates on a batch.

    For tokens that another policy μ has sampled, an importance weight must correct the rest: `token_truncate`, or
    `proximal: behavior`. Without one (`corrections: []`, masks alone, or a loss that is anchored at μ) all three are
    biased on stale data. k2 and k3 have no ratio, so they are biased from the second update on, too.

    As values all three estimate KL(π ‖ reference); d is clamped to ±20 in exponentials. `unbiased` is the default
    because only its value and its gradient both belong to this divergence: the gradient of k3 belongs to another one,
    and the value of k2 is biased.
    """
    difference = torch.where(terms.mask, terms.logprobs - terms.columns["reference_logprobs"], 0.0)
    if estimator == "k2":
        divergence = difference.square() / 2
    else:
        divergence = torch.exp(-difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - 1 + difference
        if estimator == "unbiased":
            divergence = divergence * probability_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    return coefficient * divergence, {"reference_kl": divergence.detach()}


def entropy_bonus(terms: PolicyTerms, *, coefficient: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -η H_t with the entropy H_t of the policy's distribution (Mnih et al., arXiv 1602.01783)."""
    assert terms.entropy is not None
    return -coefficient * torch.where(terms.mask, terms.entropy, 0.0), {}


def adaptive_entropy(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -c H_t like `entropy_bonus`, with c from the column `entropy_coefficient`; see `entropy_target`."""
    assert terms.entropy is not None
    return -terms.columns["entropy_coefficient"] * torch.where(terms.mask, terms.entropy, 0.0), {}
