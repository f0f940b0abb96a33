"""A correction of off-policy data: which tokens are trained on, or with which weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    import torch
    from areal_core.sdk import PolicyTerms


def near_only(
    terms: PolicyTerms,
    *,
    bound: Annotated[float, Field(gt=1, description="Tokens whose ratio is at least this are left out.")] = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Leave out tokens that have become far more likely: M_t = π_prox / π_behavior < bound, a mask, [T] bool.

    A correction that returns floats gives importance weights.
    """
    difference = (terms.proximal_logprobs - terms.behavior_logprobs).where(terms.mask, 0.0)
    ratio = difference.clamp(-20, 20).exp()
    return ratio < bound, {"far": (ratio >= bound).float()}
