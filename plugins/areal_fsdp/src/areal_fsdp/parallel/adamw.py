"""AdamW's update of one tensor (Loshchilov and Hutter, arXiv 1711.05101), in float32 whatever its moments are kept in.

Moments in bfloat16 have 8 bits of mantissa, and with a decay of 0.999 the second one changes by a thousandth of itself
at most: rounded to the nearest, it would never fall again. They are rounded up or down at random instead, so that what
is kept is right on average (stochastic rounding; Gupta et al., arXiv 1502.02551). Kahan's compensation would need the
bytes that bfloat16 saves.

The randomness is computed and not drawn: from the update's number, the tensor's and the element's place. So a resumed
run rounds as it would have, and ranks that hold the same parameters go on holding the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_MASK = 0xFFFFFFFF


def scalars_of(
    group: dict[str, Any], step: torch.Tensor, scale: torch.Tensor, applies: torch.Tensor
) -> tuple[Any, ...]:
    """What `update` has to know beside tensors: of one group of parameters, in one step.

    Args:
        group: of the optimizer's.
        step: [] float32, updates so far with this one; or [N], of N parameters (see `each_of`).
        scale: [] float32, what gradients are multiplied by.
        applies: [] bool, whether anything is changed.
    """
    beta1, beta2 = group["betas"]
    corrections = [1 - beta ** step.double() for beta in (beta1, beta2)]
    size, root = (group["lr"] / corrections[0]).float(), corrections[1].sqrt().float()
    decay = torch.full_like(size, 1 - group["lr"] * group["weight_decay"])
    return scale, applies, size, decay, root, beta1, beta2, group["eps"], step


def each_of(scalars: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """The scalars of each of so many parameters, which may have been updated a different number of times."""
    own = (value.unbind() if isinstance(value, torch.Tensor) and value.dim() else (value,) * count for value in scalars)
    return list(zip(*own, strict=True))


@cache
def _numbers(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.arange(count, device=device).unbind()


def numbers_of(count: int, moment: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """A number for each of so many tensors, where moments such as this one are rounded at random."""
    return (None,) * count if moment.dtype == torch.float32 else _numbers(count, moment.device)


def update(
    parameter: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    working: torch.Tensor | None,
    number: torch.Tensor | None,
    scale: torch.Tensor,
    applies: torch.Tensor,
    size: torch.Tensor,
    decay: torch.Tensor,
    root: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
) -> None:
    """parameter x decay - size x mean / (sqrt(square) / root + epsilon), with both moments corrected, in place.

    Args:
        parameter: float32.
        mean, square: its moments, float32 or bfloat16.
        gradient: of any dtype.
        working: where the parameter is rounded to besides.
        number: [] int64, of the tensor among all; None for moments in float32.
        scale, applies, size, decay, root, beta1, beta2, epsilon, step: see `scalars_of`.
    """
    scaled, old_mean, old_square = gradient.float() * scale, mean.float(), square.float()
    new_mean = old_mean + (1 - beta1) * (scaled - old_mean)
    new_square = beta2 * old_square + (1 - beta2) * scaled * scaled
    learned = parameter * decay - size * new_mean / (new_square.sqrt() / root + epsilon)
    learned = torch.where(applies, learned, parameter)
    new_mean, new_square = torch.where(applies, new_mean, old_mean), torch.where(applies, new_square, old_square)
    if number is not None:
        bits = _bits(mean.shape, number, step)
        new_mean, new_square = _round(new_mean, bits & 0xFFFF), _round(new_square, bits >> 16)
    mean.copy_(new_mean)
    square.copy_(new_square)
    if working is not None:
        working.copy_(learned)
    parameter.copy_(learned)


def _round(exact: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """To a float32 that bfloat16 has: the upper 16 bits, one more with the probability of what the lower ones are."""
    raised = exact.view(torch.int32) + bits.to(torch.int32)
    return (raised & -0x10000).view(torch.float32)


def _bits(shape: torch.Size, number: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element, int64."""
    place = torch.arange(shape.numel(), device=number.device).view(shape)
    return _mixed((place + _mixed(number + _mixed(step.long()))) & _MASK)


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits in which each bit depends on all (Wellons, hash-prospector), in int64, which never
    overflows: both factors are below 2**31."""
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _MASK
    return value ^ (value >> 15)
