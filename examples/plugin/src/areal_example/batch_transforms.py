"""A batch transform: columns that are added to a batch before advantages are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    import torch
    from areal_core.data import PackedBatch
    from areal_core.sdk import Context


def surprise_penalty(
    batch: PackedBatch,
    context: Context,
    *,
    scale: Annotated[float, Field(ge=0, description="Factor of the penalty.")] = 0.01,
) -> dict[str, torch.Tensor]:
    """Charge each sampled token its surprise, -log π(y_t): `token_rewards`, which `grpo/gae` reads; [T] float32."""
    del context
    return {"token_rewards": scale * batch["logprobs"].where(batch["loss_mask"], 0.0)}
