"""Differentiable collectives that torch.compile can trace.

Each is named after its forward pass; its backward pass is the transpose. `copied` and `summed` are the f and g of
Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives  # defines the operations below

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh) -> str:
    """Return the name of a one-dimensional mesh's process group, by which compiled graphs refer to it."""
    name: str = mesh.get_group().group_name
    return name


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: str) -> torch.Tensor:
        return _sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        start = mesh.get_local_rank() * len(part)
        ctx.part = slice(start, start + len(part))
        return _gather(part, group_name(mesh), mesh.size())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[ctx.part], None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradient, ctx.group), None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        ctx.moves = sent, received, group
        return _move(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _move(gradient, *ctx.moves), None, None, None


_operations: Any = torch.ops._c10d_functional


def _sum(value: torch.Tensor, group: str) -> torch.Tensor:
    result: torch.Tensor = _operations.wait_tensor(_operations.all_reduce(value.contiguous(), "sum", group))
    return result


def _gather(part: torch.Tensor, group: str, size: int) -> torch.Tensor:
    gathered = _operations.all_gather_into_tensor(part.contiguous(), size, group)
    result: torch.Tensor = _operations.wait_tensor(gathered)
    return result


def _exchange(parts: torch.Tensor, group: str) -> torch.Tensor:
    equal = [1] * len(parts)
    return _move(parts, equal, equal, group)


def _move(rows: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
    result: torch.Tensor = _operations.wait_tensor(
        _operations.all_to_all_single(rows.contiguous(), received, sent, group)
    )
    return result


def copied(value: torch.Tensor, group: str) -> torch.Tensor:
    """Return a value that is equal on all ranks; sum its gradients, because each rank does a part of the work."""
    result: torch.Tensor = _Copied.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def summed(value: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the ranks' values on every rank; gradients are not summed, because all ranks use it alike."""
    result: torch.Tensor = _Summed.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def joined(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return all ranks' parts concatenated, on every rank; each rank gets the gradient of its own part."""
    result: torch.Tensor = _Joined.apply(part, mesh)  # type: ignore[no-untyped-call]
    return result


def exchanged(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Send `parts[i]` to rank i of the group, and return the part from rank i at index i; [ranks, ...] both."""
    result: torch.Tensor = _Exchanged.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


def moved(rows: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
    """Send rows to the ranks of the group, and return the rows that they sent.

    Args:
        rows: [R, ...]; the first `sent[0]` rows go to rank 0, and so on.
        received: number of rows that come from each rank.
        sent: number of rows that go to each rank.
        group: name of the process group.
    """
    result: torch.Tensor = _Moved.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result
