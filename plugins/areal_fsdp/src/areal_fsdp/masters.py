"""Half-precision computing on one rank: float32 masters beside the parameters that the model computes with.

Sharding would do it too, but gathers, splits and copies each layer although there is nobody to share it with. Here the
model holds its parameters in half precision; the optimizer holds float32 ones. A gradient is added to its master's,
in float32, as soon as the backward pass has it, so micro-batches add up without rounding; after an update the masters
are rounded into the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Masters:
    """Float32 copies of a model's parameters, which learn.

    Args:
        model: with float32 parameters, which become `dtype` here; tied ones stay tied.
        dtype: what the model computes in.
        device: where model and masters go.

    Attributes:
        parameters: by name, float32; their `grad` grows as backward passes run.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}
        parameter: Any  # whose hooks have no types
        for name, parameter in model.named_parameters():
            master = torch.nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            self.parameters[name] = master
            parameter.data = master.detach().to(dtype)
            parameter.register_post_accumulate_grad_hook(_adder(master))
        self._working = [parameter.detach() for parameter in model.parameters()]
        model.to(device)  # buffers

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters."""
        torch._foreach_copy_(self._working, list(self.parameters.values()))


def _adder(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad += gradient

    return add
