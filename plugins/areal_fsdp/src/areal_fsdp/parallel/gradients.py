"""Gradients of all ranks together: their norm, and the sums that sharding does not make."""

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
    """Norm of all gradients of all ranks together, [] float32; collective where they are sharded."""
    found = list(gradients)
    if ranks.shards is None:
        return _norm(found)
    # What the ranks of `tensor` divide lies on one more dimension than what each of them has whole.
    whole = [g for g in found if not isinstance(g, DTensor)]
    sharded = [g for g in found if isinstance(g, DTensor)]
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
    """Over the ranks of a mesh; where parameters are offloaded, by way of the device that the mesh is of."""
    moved = value.to(mesh.device_type, copy=True)
    dist.all_reduce(moved, group=mesh.get_group())
    return moved.to(value.device)


def sum_gradients(parameters: Iterable[tuple[torch.nn.Parameter, DeviceMesh]]) -> None:
    """Over the ranks of a mesh, of parameters that each of them has whole; collective."""
    by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter, mesh in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(mesh, []).append(own_part(parameter.grad))
    for mesh, gradients in by_mesh.items():
        together = _summed(torch.cat([gradient.flatten() for gradient in gradients]), mesh)
        start = 0
        for gradient in gradients:
            gradient.copy_(together[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
