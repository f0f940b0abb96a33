"""A policy loss: a pure function of packed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms


def capped_reinforce(
    terms: PolicyTerms, *, cap: Annotated[float, Field(gt=0, description="Upper bound of a token's weight.")] = 2.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_t = -min(r_t, cap) A log π(y_t), no gradient through r_t = π / π_prox (CISPO, arXiv 2506.13585); [T]."""
    ratio = torch.exp(terms.logprobs.detach() - terms.proximal_logprobs)
    losses = -ratio.clamp(max=cap) * terms.advantages * terms.logprobs
    return losses, {"capped_fraction": (ratio > cap).float()}
