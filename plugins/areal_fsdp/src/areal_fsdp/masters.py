"""Half-precision computing on one rank: float32 masters beside the parameters that the model computes with.

Sharding would do it too, but gathers, splits and copies each layer although there is nobody to share it with. Here the
model holds its parameters in half precision; the optimizer holds float32 ones, and after an update they are rounded
into the model. Gradients of several micro-batches add up in float32, each as soon as the backward pass has it. That of
a single one stays as the backward pass made it, if the update is compiled: one kernel then reads it, updates master
and moments, and writes the rounded parameter.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal_fsdp.compiling import compiled, mark_dynamic

if TYPE_CHECKING:
    from collections.abc import Callable

_INNER = 128
"""Parameters are updated as rows of this many elements where that comes out even: aligned rows load in wide words."""


class Masters:
    """Float32 copies of a model's parameters, which learn.

    Args:
        model: with float32 parameters, which become `dtype` here; tied ones stay tied.
        dtype: what the model computes in.
        device: where model and masters go.
        is_compiled: whether the update is compiled.

    Attributes:
        parameters: by name, float32; their `grad` grows as backward passes run, or stays None (see `gradients`).
        updates_itself: whether `step` is to be used, and not the optimizer's own.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device, *, is_compiled: bool) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.updates_itself = is_compiled
        self._adds = True
        self._working: list[torch.nn.Parameter] = []
        parameter: Any  # whose hooks have no types
        for name, parameter in model.named_parameters():
            master = torch.nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            self.parameters[name] = master
            parameter.data = master.detach().to(dtype)
            parameter.register_post_accumulate_grad_hook(self._adder(master))
            self._working.append(parameter)
        model.to(device)  # buffers

    def _adder(self, master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            if not self._adds or parameter.grad is None:
                return
            gradient, parameter.grad = parameter.grad, None
            if master.grad is None:
                master.grad = gradient.to(torch.float32)
            else:
                master.grad += gradient

        return add

    def expect(self, rounds: int) -> None:
        """Say how many backward passes the next update has, before the first."""
        self._adds = rounds > 1 or not self.updates_itself

    def gradients(self) -> list[torch.Tensor]:
        """Of all parameters that have one, in their order; float32 or the model's dtype."""
        pairs = zip(self.parameters.values(), self._working, strict=True)
        found = (master.grad if self._adds else working.grad for master, working in pairs)
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters."""
        torch._foreach_copy_([p.detach() for p in self._working], list(self.parameters.values()))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.AdamW, scale: torch.Tensor, is_finite: torch.Tensor) -> None:
        """AdamW's update, by kernels of our own, and the model's parameters with it; gradients are freed.

        Args:
            optimizer: its groups' settings are used and its state is changed, as by its own step.
            scale: [] float32, what gradients are multiplied by.
            is_finite: [] bool, whether anything is changed.
        """
        update = _update_function()
        working = dict(zip(self.parameters.values(), self._working, strict=True))
        steps = [state["step"] for state in optimizer.state.values()]
        torch._foreach_add_(steps, is_finite.float())
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            corrections = [1 - beta ** steps[0].double() for beta in (beta1, beta2)]
            size = (group["lr"] / corrections[0]).float()
            decay = torch.full_like(size, 1 - group["lr"] * group["weight_decay"])
            root = corrections[1].sqrt().float()
            for master in group["params"]:
                gradient = master.grad if self._adds else working[master].grad
                master.grad = working[master].grad = None
                if gradient is None:
                    continue
                state = optimizer.state[master]
                tensors = (master, state["exp_avg"], state["exp_avg_sq"], working[master], gradient)
                rows = [_as_rows(tensor.detach()) for tensor in tensors]
                update(*rows, scale, is_finite, size, decay, root, beta1, beta2, group["eps"])


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.reshape(-1, _INNER) if tensor.numel() % _INNER == 0 else tensor.reshape(-1)
    mark_dynamic(rows, 0)
    return rows


@cache
def _update_function() -> Callable[..., None]:
    return compiled(_adamw)


def _adamw(
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    working: torch.Tensor,
    gradient: torch.Tensor,
    scale: torch.Tensor,
    is_finite: torch.Tensor,
    size: torch.Tensor,
    decay: torch.Tensor,
    root: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """One parameter: master x decay - size x mean / (sqrt(square) / root + epsilon), with both moments corrected."""
    scaled = gradient.float() * scale
    new_mean = mean + (1 - beta1) * (scaled - mean)
    new_square = beta2 * square + (1 - beta2) * scaled * scaled
    learned = master * decay - size * new_mean / (new_square.sqrt() / root + epsilon)
    learned = torch.where(is_finite, learned, master)
    mean.copy_(torch.where(is_finite, new_mean, mean))
    square.copy_(torch.where(is_finite, new_square, square))
    working.copy_(learned)
    master.copy_(learned)
