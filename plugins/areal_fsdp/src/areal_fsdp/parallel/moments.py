"""AdamW with moments in bfloat16, in host memory, or both.

An update processes this rank's part of each parameter in pieces, which bounds its temporary memory. With moments in
host memory, the update of one piece overlaps the fetch of the next piece and the write-back of the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from areal_fsdp.parallel.adamw import each_of, numbers_of, scalars_of
from areal_fsdp.parallel.tensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    _Tensors = tuple[torch.Tensor, ...]

PIECE = 1 << 24
"""Elements of a piece: 64 MiB in float32, which PCIe transfers in a few milliseconds."""


class PiecewiseAdamW(torch.optim.AdamW):
    """AdamW on local parts of parameters, plain or sharded.

    Like PyTorch's fused AdamW, it reads `found_inf` (a step is skipped unless it is 0) and `grad_scale` (gradients are
    divided by it, unless it is None).

    Args:
        groups: parameter groups.
        update: `areal_fsdp.parallel.adamw.update`, or the same function compiled for one-dimensional tensors.
        settings: arguments of `torch.optim.AdamW`.
    """

    found_inf: torch.Tensor
    grad_scale: torch.Tensor | None

    def __init__(self, groups: list[dict[str, Any]], *, update: Callable[..., None], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Moments in host memory are complete when this returns."""
        del closure
        applies = self.found_inf == 0
        scale = torch.ones_like(self.found_inf) if self.grad_scale is None else 1 / self.grad_scale
        work = []
        for group in self.param_groups:
            learns = [p for p in group["params"] if p.grad is not None]
            steps = [self.state[p]["step"] for p in learns]
            if steps:
                torch._foreach_add_(steps, applies.float())
                scalars = each_of(scalars_of(group, torch.stack(steps), scale, applies), len(steps))
                work += [
                    (piece, values) for p, values in zip(learns, scalars, strict=True) for piece in self._pieces(p)
                ]
        if not work:
            return
        (parameter, mean, *_), _ = work[0]
        numbers = numbers_of(len(work), torch.empty((), dtype=mean.dtype, device=parameter.device))
        run = _on_device if mean.device == parameter.device else _streamed
        run(
            [(piece, (None, number, *scalars)) for (piece, scalars), number in zip(work, numbers, strict=True)],
            self._update,
        )

    def _pieces(self, parameter: torch.nn.Parameter) -> Iterator[_Tensors]:
        """Yield (parameter, mean, square, gradient) of each piece, [PIECE] each; the last piece is shorter."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        whole = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        flat = [own_part(tensor).view(-1) for tensor in whole] + [own_part(gradient).reshape(-1)]
        yield from zip(*(torch.split(tensor, PIECE) for tensor in flat if tensor.numel()), strict=True)


_Work = list[tuple["_Tensors", tuple[Any, ...]]]


def _on_device(work: _Work, function: Callable[..., None]) -> None:
    for tensors, others in work:
        function(*tensors, *others)


@dataclass(slots=True)
class _Slot:
    """Device memory for the moments of one piece, and events that mark its progress."""

    moments: torch.Tensor
    fetched: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    updated: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    stored: torch.cuda.Event = field(default_factory=torch.cuda.Event)


def _streamed(work: _Work, function: Callable[..., None]) -> None:
    """Update pieces with moments in host memory.

    Two slots alternate, and two streams copy, so that both directions of PCIe and the device are busy at the same time.
    """
    (parameter, mean, *_), _ = work[0]
    device = parameter.device
    stream: Any = torch.cuda.Stream  # its constructor has no types
    current, fetching, storing = torch.cuda.current_stream(device), stream(device), stream(device)
    size = max(len(tensors[0]) for tensors, _ in work)
    slots = [_Slot(torch.empty(2, size, dtype=mean.dtype, device=device)) for _ in range(2)]
    fetching.wait_stream(current)  # earlier kernels may still use the slots' memory
    for number, ((parameter, mean, square, gradient), others) in enumerate(work):
        slot = slots[number % 2]
        near_mean, near_square = slot.moments[:, : len(mean)]
        with torch.cuda.stream(fetching):
            fetching.wait_event(slot.stored)  # returns immediately for a slot's first piece
            near_mean.copy_(mean, non_blocking=True)
            near_square.copy_(square, non_blocking=True)
            slot.fetched.record(fetching)
        current.wait_event(slot.fetched)
        function(parameter, near_mean, near_square, gradient, *others)
        slot.updated.record(current)
        with torch.cuda.stream(storing):
            storing.wait_event(slot.updated)
            mean.copy_(near_mean, non_blocking=True)
            square.copy_(near_square, non_blocking=True)
            slot.stored.record(storing)
    storing.synchronize()  # a checkpoint reads host memory without waiting for a stream
