"""Half-precision computing on one rank: float32 masters beside the parameters that the model computes with.

Sharding would do it too, but gathers, splits and copies each layer although there is nobody to share it with. Here the
model holds its parameters in half precision; the optimizer holds float32 ones, and after an update they are rounded
into the model. Gradients of several micro-batches add up in float32, each as soon as the backward pass has it. That of
a single one stays as the backward pass made it, if the update is compiled: one kernel then reads it, updates master
and moments, and writes the rounded parameter.
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
    """Whether gradients are added to the masters'; shared with the hooks, which must not know the masters' owner:
    Python frees no circle that goes through a tensor's hooks."""

    adds: bool = True


class Masters:
    """Float32 copies of a model's parameters, which learn.

    Args:
        model: its parameters.
        learning: those that learn, by name; float32, and become `dtype` here. Tied ones stay tied.
        dtype: what the model computes in.
        kept: names of those that stay float32.
        device: where model and masters go.
        is_compiled: whether the update is compiled.

    Attributes:
        parameters: by name, float32; their `grad` grows as backward passes run, or stays None (see `gradients`).
        updates_itself: whether `step` is to be used, and not the optimizer's own.
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
        parameter: Any  # whose hooks have no types
        for name, parameter in learning.items():
            master = torch.nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            self.parameters[name] = master
            parameter.data = master.detach().to(torch.float32 if name in kept else dtype, copy=True)
            parameter.register_post_accumulate_grad_hook(_adder(master, self._mode))
            self._working.append(parameter)
        model.to(device)  # buffers

    def expect(self, rounds: int) -> None:
        """Say how many backward passes the next update has, before the first."""
        self._mode.adds = rounds > 1 or not self.updates_itself

    def gradients(self) -> list[torch.Tensor]:
        """Of all parameters that have one, in their order; float32 or the model's dtype."""
        pairs = zip(self.parameters.values(), self._working, strict=True)
        found = (master.grad if self._mode.adds else working.grad for master, working in pairs)
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def sync(self) -> None:
        """Round the masters into the model's parameters."""
        torch._foreach_copy_([p.detach() for p in self._working], list(self.parameters.values()))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.AdamW, scale: torch.Tensor, applies: torch.Tensor) -> None:
        """AdamW's update, by kernels of our own, and the model's parameters with it; gradients are freed.

        Args:
            optimizer: its groups' settings are used and its state is changed, as by its own step.
            scale: [] float32, what gradients are multiplied by.
            applies: [] bool, whether anything is changed.
        """
        steps = [state["step"] for state in optimizer.state.values()]
        torch._foreach_add_(steps, applies.float())
        for group in optimizer.param_groups:
            scalars = scalars_of(group, steps[0], scale, applies)
            for tensors in self._by_layer(set(group["params"]), optimizer):
                _update_function()(tensors, *scalars)

    def _by_layer(self, among: set[torch.nn.Parameter], optimizer: torch.optim.AdamW) -> Iterable[list[_Tensors]]:
        """What an update reads and writes, one layer after another: equal layers share one graph."""
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
