"""Gradients across ranks: their norm, and sums of gradients that FSDP does not reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal_fsdp.parallel.tensor import own_part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

    from areal_fsdp.parallel.mesh import Ranks


def gradient_norm(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """Return the L2 norm of all gradients on all ranks, [] float32; collective for sharded gradients."""
    gradients = list(gradients)
    if ranks.shards is None:
        return _norm(gradients)
    # The mesh of a tensor-parallel gradient has one more dimension than that of a gradient which every rank of `tensor`
    # has whole.
    whole = [g for g in gradients if not isinstance(g, DTensor)]
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    divided = [g for g in sharded if ranks.tensor is not None and _dimensions(g) > ranks.shards.ndim]
    same = [g for g in sharded if ranks.tensor is None or _dimensions(g) == ranks.shards.ndim]
    total = _norm(map(own_part, same)).square()
    if ranks.tensor is not None:
        total = total + _summed(_norm(map(own_part, divided)).square(), ranks.tensor)
    total = _summed(total, ranks.shards["shards"])
    return (total + _norm(whole).square().to(total.device) if whole else total).sqrt()


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2.0, torch.float32)))


def _dimensions(gradient: DTensor) -> int:
    return gradient.device_mesh.ndim


def _summed(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum over the ranks of a mesh; an offloaded value is reduced on the mesh's device."""
    moved = value.to(mesh.device_type, copy=True)
    dist.all_reduce(moved, group=mesh.get_group())
    return moved.to(value.device)


def sum_gradients(parameters: Iterable[tuple[torch.nn.Parameter, DeviceMesh]]) -> None:
    """Sum the gradients of parameters over the ranks of their mesh, in place; collective.

    Args:
        parameters: each with the mesh whose ranks all have the parameter, and a part of its gradient.
    """
    by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter, mesh in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(mesh, []).append(own_part(parameter.grad))
    for mesh, gradients in by_mesh.items():
        total = _summed(torch.cat([gradient.flatten() for gradient in gradients]), mesh)
        start = 0
        for gradient in gradients:
            gradient.copy_(total[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
