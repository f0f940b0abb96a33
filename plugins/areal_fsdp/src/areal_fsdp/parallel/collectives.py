"""Sums and exchanges between ranks that have gradients, and that a compiler can take into its graph.

Named by what goes forward; the backward pass is the transpose. `copied` and `summed` are the f and g of Megatron-LM
(arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives  # defines the operations below

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh) -> str:
    """Of a mesh with one dimension: what a compiled graph knows its group by."""
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
        ctx.place = slice(start, start + len(part))
        return _gather(part, group_name(mesh), mesh.size())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[ctx.place], None


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
    def forward(ctx: Any, rows: torch.Tensor, taken: list[int], given: list[int], group: str) -> torch.Tensor:
        ctx.moves = given, taken, group
        return _move(rows, taken, given, group)

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


def _move(rows: torch.Tensor, taken: list[int], given: list[int], group: str) -> torch.Tensor:
    result: torch.Tensor = _operations.wait_tensor(
        _operations.all_to_all_single(rows.contiguous(), taken, given, group)
    )
    return result


def copied(value: torch.Tensor, group: str) -> torch.Tensor:
    """The same on every rank, each of which goes on with a part of the work: gradients are added up."""
    result: torch.Tensor = _Copied.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def summed(value: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of what the ranks have, on each; all of them go on alike, so the gradient is each one's own."""
    result: torch.Tensor = _Summed.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def joined(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All ranks' parts behind one another, on each; all of them go on alike, so each part keeps its own gradient."""
    result: torch.Tensor = _Joined.apply(part, mesh)  # type: ignore[no-untyped-call]
    return result


def exchanged(parts: torch.Tensor, group: str) -> torch.Tensor:
    """`parts[i]` goes to rank i of the group; what comes back at i is from rank i. [ranks, ...] both."""
    result: torch.Tensor = _Exchanged.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


def moved(rows: torch.Tensor, taken: list[int], given: list[int], group: str) -> torch.Tensor:
    """The first `given[0]` rows go to rank 0 of the group, and so on; `taken[i]` of what comes back are from rank i."""
    result: torch.Tensor = _Moved.apply(rows, taken, given, group)  # type: ignore[no-untyped-call]
    return result
