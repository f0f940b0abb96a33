"""AdamW's update of one tensor (Loshchilov and Hutter, arXiv 1711.05101), computed in float32 for moments of any dtype.

Moments in bfloat16 have 8 bits of mantissa, and with a decay of 0.999 the second moment falls by at most a thousandth
of itself in a step: rounded to the nearest, it would never fall. Stochastic rounding keeps it correct on average (Gupta
et al., arXiv 1502.02551). Kahan summation would need the bytes that bfloat16 saves.

The random bits are a hash of the update's number, the tensor's number and the element's index. So a resumed run rounds
as the original run, and ranks with copies of a parameter keep equal copies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_MASK = 0xFFFFFFFF


def scalars_of(
    group: dict[str, Any], step: torch.Tensor, scale: torch.Tensor, applies: torch.Tensor
) -> tuple[Any, ...]:
    """Return the scalars that `update` takes, for one parameter group in one step.

    Args:
        group: a parameter group of the optimizer.
        step: [] float32, number of updates including this one; or [N], for N parameters (see `each_of`).
        scale: [] float32, factor of the gradients.
        applies: [] bool; False leaves parameters and moments unchanged.
    """
    beta1, beta2 = group["betas"]
    corrections = [1 - beta ** step.double() for beta in (beta1, beta2)]
    size, root = (group["lr"] / corrections[0]).float(), corrections[1].sqrt().float()
    decay = torch.full_like(size, 1 - group["lr"] * group["weight_decay"])
    return scale, applies, size, decay, root, beta1, beta2, group["eps"], step


def each_of(scalars: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Split scalars for `count` parameters, some of them [count], into the scalars of each parameter."""
    columns = (
        value.unbind() if isinstance(value, torch.Tensor) and value.dim() else (value,) * count for value in scalars
    )
    return list(zip(*columns, strict=True))


@cache
def _numbers(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.arange(count, device=device).unbind()


def numbers_of(count: int, moment: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return a number for each of `count` tensors, the seed of stochastic rounding; None for float32 moments."""
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
    """Update a parameter and its moments in place: parameter x decay - size x mean / (sqrt(square) / root + epsilon).

    All tensors have the same shape. `size` and `root` contain the bias corrections of the two moments; see `scalars_of`
    for the other scalars.

    Args:
        parameter: float32.
        mean: first moment, float32 or bfloat16.
        square: second moment, of the same dtype.
        gradient: any floating-point dtype.
        working: copy of the parameter in another dtype, which is updated too; or None.
        number: [] int64, the tensor's number, for stochastic rounding; None for float32 moments.
        scale: [] float32.
        applies: [] bool.
        size: [] float32.
        decay: [] float32.
        root: [] float32.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the denominator.
        step: [] float32.
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
    """Round float32 stochastically to a value that bfloat16 represents: 16 random bits are added, 16 bits cut off."""
    raised = exact.view(torch.int32) + bits.to(torch.int32)
    return (raised & -0x10000).view(torch.float32)


def _bits(shape: torch.Size, number: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element, int64."""
    index = torch.arange(shape.numel(), device=number.device).view(shape)
    return _hash((index + _hash(number + _hash(step.long()))) & _MASK)


def _hash(value: torch.Tensor) -> torch.Tensor:
    """Apply a bijection of 32 bits in which each bit depends on all others (Wellons, hash-prospector).

    int64 does not overflow, because both factors are below 2**31.
    """
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _MASK
    return value ^ (value >> 15)
