"""AdamW whose moments are in bfloat16, in host memory, or both.

An update goes through what this rank has of each parameter piece by piece. Pieces bound what the computation needs
beside the parameters; and of moments in host memory one piece is computed with while the next one is fetched and the
last one goes back.
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
"""Elements of a piece: 64 MiB in float32, which a bus brings in a few milliseconds."""


class PiecewiseAdamW(torch.optim.AdamW):
    """AdamW on local parts of parameters, plain or sharded.

    As the fused one of PyTorch it reads `found_inf` (nothing is changed unless it is 0) and `grad_scale` (gradients
    are divided by it, unless it is None).

    Args:
        groups: of parameters.
        update: `areal_fsdp.parallel.adamw.update`, or the same compiled for tensors [any].
        settings: AdamW's own.
    """

    found_inf: torch.Tensor
    grad_scale: torch.Tensor | None

    def __init__(self, groups: list[dict[str, Any]], *, update: Callable[..., None], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; moments in host memory are there when it returns."""
        del closure
        applies = self.found_inf == 0
        scale = torch.ones_like(self.found_inf) if self.grad_scale is None else 1 / self.grad_scale
        work = []
        for group in self.param_groups:
            learns = [p for p in group["params"] if p.grad is not None]
            steps = [self.state[p]["step"] for p in learns]
            if steps:
                torch._foreach_add_(steps, applies.float())
                every = each_of(scalars_of(group, torch.stack(steps), scale, applies), len(steps))
                work += [(piece, own) for p, own in zip(learns, every, strict=True) for piece in self._pieces(p)]
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
        """Parameter, moments and gradient, [PIECE] each but for the last."""
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
    """A place on the device for the moments of one piece, and how far they are."""

    moments: torch.Tensor
    fetched: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    updated: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    stored: torch.cuda.Event = field(default_factory=torch.cuda.Event)


def _streamed(work: _Work, function: Callable[..., None]) -> None:
    """Two slots take turns, and two streams copy, so that both ways of the bus and the device are busy at once."""
    (parameter, mean, *_), _ = work[0]
    device = parameter.device
    stream: Any = torch.cuda.Stream  # which has no types
    current, fetching, storing = torch.cuda.current_stream(device), stream(device), stream(device)
    size = max(len(tensors[0]) for tensors, _ in work)
    slots = [_Slot(torch.empty(2, size, dtype=mean.dtype, device=device)) for _ in range(2)]
    fetching.wait_stream(current)  # what used the slots' memory before
    for number, ((parameter, mean, square, gradient), others) in enumerate(work):
        slot = slots[number % 2]
        near_mean, near_square = slot.moments[:, : len(mean)]
        with torch.cuda.stream(fetching):
            fetching.wait_event(slot.stored)  # which nothing has to wait for in the first turn
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
    storing.synchronize()  # a checkpoint reads host memory, and asks no stream
