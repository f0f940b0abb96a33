"""Mixed precision on one rank: float32 masters of the half-precision parameters that the model computes with.

FSDP's mixed precision would also work, but on one rank its gathers and copies only cost time. Here the model holds its
parameters in half precision, the optimizer updates float32 masters, and an update rounds them into the model.

Gradients of several micro-batches are accumulated in float32 during the backward pass. The gradient of a single
micro-batch stays in half precision if the update is compiled: one kernel reads it, updates master and moments, and
writes the rounded parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal_fsdp.models.compiling import compiled
from areal_fsdp.parallel.adamw import numbers_of, scalars_of
from areal_fsdp.parallel.adamw import update as adamw
from areal_fsdp.parallel.file_names import layer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    _Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(slots=True)
class _Mode:
    """`adds`: True if hooks accumulate gradients in the masters.

    The hooks refer to this object and not to `Masters`, because Python never frees a cycle through a tensor's hooks.
    """

    adds: bool = True


class Masters:
    """Float32 copies of a model's trained parameters.

    Args:
        model: the model; it is moved to `device`.
        learning: the trained parameters by name, float32. They are converted to `dtype`; tied parameters stay tied.
        dtype: dtype of the computation.
        device: device of model and masters.
        kept: names of parameters that stay in float32.
        is_compiled: True to use the compiled update, `step`.

    Attributes:
        parameters: the masters by name, float32. Backward passes accumulate their `grad`, or leave it None; see
            `gradients`.
        updates_itself: True if the caller must use `step` instead of the optimizer's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        learning: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        kept: Collection[str] = (),
        is_compiled: bool,
    ) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.updates_itself = is_compiled
        self._mode = _Mode()
        self._working: list[torch.nn.Parameter] = []
        parameter: Any  # its hooks have no types
        for name, parameter in learning.items():
            master = torch.nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            self.parameters[name] = master
            parameter.data = master.detach().to(torch.float32 if name in kept else dtype, copy=True)
            parameter.register_post_accumulate_grad_hook(_adder(master, self._mode))
            self._working.append(parameter)
        model.to(device)  # buffers

    def expect(self, rounds: int) -> None:
        """Set the number of backward passes of the next update, before the first of them."""
        self._mode.adds = rounds > 1 or not self.updates_itself

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist, in the order of the parameters; float32 or the dtype of the computation."""
        pairs = zip(self.parameters.values(), self._working, strict=True)
        gradients = (master.grad if self._mode.adds else working.grad for master, working in pairs)
        return [gradient for gradient in gradients if gradient is not None]

    @torch.no_grad()
    def sync(self) -> None:
        """Round the masters into the model's parameters."""
        torch._foreach_copy_([p.detach() for p in self._working], list(self.parameters.values()))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.AdamW, scale: torch.Tensor, applies: torch.Tensor) -> None:
        """Make AdamW's update of masters and model with compiled kernels, and free the gradients.

        Args:
            optimizer: the optimizer; this uses its groups' settings and updates its state.
            scale: [] float32, factor of the gradients.
            applies: [] bool; False leaves parameters and moments unchanged.
        """
        steps = [state["step"] for state in optimizer.state.values()]
        torch._foreach_add_(steps, applies.float())
        for group in optimizer.param_groups:
            scalars = scalars_of(group, steps[0], scale, applies)
            for tensors in self._by_layer(set(group["params"]), optimizer):
                _update_function()(tensors, *scalars)

    def _by_layer(self, among: set[torch.nn.Parameter], optimizer: torch.optim.AdamW) -> Iterable[list[_Tensors]]:
        """Return the tensors of an update, layer by layer: equal layers share one compiled graph."""
        layers: dict[str, list[_Tensors]] = {}
        numbers = numbers_of(len(self._working), optimizer.state[next(iter(among))]["exp_avg"])
        for (name, master), working, number in zip(self.parameters.items(), self._working, numbers, strict=True):
            if master not in among:
                continue
            gradient = master.grad if self._mode.adds else working.grad
            master.grad = working.grad = None
            if gradient is not None:
                state = optimizer.state[master]
                tensors = (master.detach(), state["exp_avg"], state["exp_avg_sq"], gradient, working.detach(), number)
                layer = layer_of(name)
                layers.setdefault("" if layer == name else layer, []).append(tensors)
        return layers.values()


def _adder(master: torch.nn.Parameter, mode: _Mode) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a parameter's gradient into its master's."""

    def add(parameter: torch.Tensor) -> None:
        if not mode.adds or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad, None
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad += gradient

    return add


@cache
def _update_function() -> Callable[..., None]:
    return compiled(_update, dynamic=False)


def _update(tensors: list[_Tensors], *scalars: Any) -> None:
    for several in tensors:
        adamw(*several, *scalars)
