"""Token losses with one ratio for the whole sequence: pure functions of `PolicyTerms`, flat [T] in and out.

The papers define one loss for a sequence. Here each token of a sequence has that loss, and its own gradient. So the
loss aggregation `core/sequence_mean`, the mean over a sequence's tokens, gives the paper's loss and gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_grpo.ratios import LOG_RATIO_BOUND, clip_shares, log_ratio

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def gspo(terms: PolicyTerms, *, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean_t log π / π_prox) (GSPO, arXiv
    2507.18071).

    s is the same for all tokens of a sequence. As in the paper's GSPO-token, each token has the gradient of its own
    log-probability, s_t = sg(s) π / sg(π), so that advantages may differ within a sequence. If they do not, the mean
    over the tokens has the gradient of GSPO. A mean of log-ratios moves far less than one log-ratio, so the bounds are
    a thousandth of PPO's.

    Returns:
        The loss, and `ratio` (s), and the clip fractions of `ppo_clip`.
    """
    log_ratios = log_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    ratio = (_mean(terms, log_ratios) + log_ratios - log_ratios.detach()).exp()
    plain = -ratio * terms.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * terms.advantages
    logged = {"ratio": ratio.detach(), **clip_shares(clipped > plain, terms.advantages)}
    return torch.maximum(plain, clipped), logged


def gmpo(terms: PolicyTerms, *, clip_low: float, clip_high: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return L_t = -A exp(mean_t l_t), with l_t = log(π / π_prox) clipped by token (GMPO, arXiv 2507.20673).

    l_t is at most `clip_high` if A > 0, else at least -`clip_low`. Like the minimum in PPO's loss, this bounds what a
    token can gain, not what it can lose. The bounds apply to log-ratios; the paper has 0.4. A clipped token has no
    gradient but still counts in the mean.

    Returns:
        The loss, and `ratio` (the geometric mean), and the clip fractions of `ppo_clip`.
    """
    log_ratios = log_ratio(terms.logprobs, terms.proximal_logprobs, terms.mask)
    gains = terms.advantages > 0
    bounded = torch.where(gains, log_ratios.clamp(max=clip_high), log_ratios.clamp(min=-clip_low))
    ratio = (_mean(terms, bounded) + bounded - bounded.detach()).exp()
    clipped = torch.where(gains, log_ratios > clip_high, log_ratios < -clip_low)
    return -ratio * terms.advantages, {"ratio": ratio.detach(), **clip_shares(clipped, terms.advantages)}


def _mean(terms: PolicyTerms, values: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean over its sequence's tokens in the mask, [T] without gradients."""
    return terms.row_mean(values.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[terms.row_index]
