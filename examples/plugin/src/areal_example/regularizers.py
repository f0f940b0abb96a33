"""A regularizer: a loss beside that of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    import torch
    from areal_core.sdk import PolicyTerms


def stay_close(
    terms: PolicyTerms, *, coefficient: Annotated[float, Field(ge=0, description="Weight of the term.")] = 0.01
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Stay close to the policy that sampled: c (log π(y_t) - log π_behavior(y_t))², [T] float32."""
    distance = (terms.logprobs - terms.behavior_logprobs).where(terms.mask, 0.0)
    return coefficient * distance.square(), {"distance": distance.abs()}
