"""AdamW, its learning rate, and its step with clipped gradients; the same for plain and for sharded parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal_parallel.tensor import own_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.masters import Masters
    from areal_parallel.mesh import Ranks


def learning_rate_at(update: int, config: FSDPConfig, total_updates: int) -> float:
    """The learning rate of an update.

    Args:
        update: how many updates were applied before it.
        config: warm-up, schedule and bounds.
        total_updates: of the whole run; a decay ends there.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    lowest = config.minimum_learning_rate_ratio
    return config.learning_rate * (lowest + (1 - lowest) * left)


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: FSDPConfig) -> torch.optim.AdamW:
    """Fused AdamW whose state exists from the start.

    The state is made here and not in the first step, so that a checkpoint always has the same tensors and memory does
    not grow after the first batch.
    """
    everything = list(parameters)
    groups: list[dict[str, Any]] = []
    for some in _by_mesh(everything).values():
        groups += [
            {"params": [p for p in some if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in some if p.dim() <= 1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )
    for parameter in everything:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def gradient_norm(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """Norm of all gradients of all ranks together, [] float32; collective where they are sharded."""
    found = list(gradients)
    if ranks.shards is None:
        return _norm(found)
    # What the ranks of `tensor` divide lies on one more dimension than what each of them has whole.
    divided = [g for g in found if ranks.tensor is not None and _dimensions(g) > ranks.shards.ndim]
    same = [g for g in found if ranks.tensor is None or _dimensions(g) == ranks.shards.ndim]
    total = _norm(map(own_part, same)).square()
    if ranks.tensor is not None:
        total = total + _summed(_norm(map(own_part, divided)).square(), ranks.tensor)
    return _summed(total, ranks.shards["shards"]).sqrt()


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2.0, torch.float32)))


def _dimensions(gradient: torch.Tensor) -> int:
    return gradient.device_mesh.ndim if isinstance(gradient, DTensor) else 0


def _summed(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Over the ranks of a mesh; where parameters are offloaded, by way of the device that the mesh is of."""
    moved = value.to(mesh.device_type, copy=True)
    dist.all_reduce(moved, group=mesh.get_group())
    return moved.to(value.device)


def sum_gradients(parameters: Sequence[torch.nn.Parameter], mesh: DeviceMesh) -> None:
    """Over the ranks of a mesh, of parameters that each of them has whole; collective."""
    gradients = [own_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        together = _summed(torch.cat([gradient.flatten() for gradient in gradients]), mesh)
        start = 0
        for gradient in gradients:
            gradient.copy_(together[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def _by_mesh(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Tensors that are divided among the same ranks: an operation takes no others together."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return found


def step(optimizer: torch.optim.AdamW, norm: torch.Tensor, max_norm: float | None, masters: Masters | None) -> None:
    """Clip and apply the gradients, unless their norm is not finite or 0, and free them. Nothing waits for the device.

    Where no token counts there is nothing to learn, and momentum alone must not move the parameters.

    Clipping happens inside the kernel that updates: it costs no pass over the gradients.

    Args:
        optimizer: made by `make_optimizer`.
        norm: [] of all gradients of all ranks.
        max_norm: what it is clipped to, None for never.
        masters: whose parameters learn, None where those of the model do.
    """
    applies = norm.isfinite() & (norm > 0)
    over = torch.ones_like(norm) if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1)
    if masters is not None and masters.updates_itself:
        masters.step(optimizer, 1 / over, applies)
        return
    scaled: Any = optimizer
    scaled.found_inf, scaled.grad_scale = (~applies).float(), None if max_norm is None else over
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if masters is not None:
        masters.publish()
