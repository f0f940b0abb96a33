"""Records the routed experts of live requests' tokens with hooks on the model's routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError
from areal_core.models import MoEShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INITIAL_COLUMNS = 32
"""Positions for which memory is allocated first. It is doubled as rows grow."""


class RoutedExperts:
    """The routed experts of every live row by position. Rows are those of `Rows`, positions those of its cache.

    The experts of a position are recorded when it is computed first. A cache that is rebuilt with new weights does not
    change them, because the following tokens were sampled with the first ones.

    Args:
        model: the model, to whose routers hooks are added.
        capacity: number of rows.

    Raises:
        RunError: the model is not an MoE with known routers.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.moe = MoEShape.of(model.config.to_dict())
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if len(routers) != len(self.moe.layers):
            raise RunError(
                f"{len(self.moe.layers)} layers of the model should have experts, but {len(routers)} have a router",
                hints=["set inference_engine.routed_experts to false"],
            )
        for router in routers:
            router.register_forward_hook(self._record)
        self._layer_choices: list[torch.Tensor] = []
        self._capacity, self._device = capacity, model.device
        self.reset()

    def reset(self) -> None:
        """Free the memory of rows that have been removed."""
        dtype = getattr(torch, self.moe.dtype)
        self._recorded = torch.zeros(
            self._capacity, _INITIAL_COLUMNS, *self.moe.shape, dtype=dtype, device=self._device
        )

    def _record(self, router: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        self._layer_choices.append(output[2])

    def take_choices(self) -> torch.Tensor:
        """Return [T, layers, choices], counted from 1, for the last forward's T tokens, including padding."""
        choices = torch.stack(self._layer_choices, 1) + 1
        self._layer_choices.clear()
        return choices.to(self._recorded.dtype)

    def fill(self, start: int, source: torch.Tensor, longest: int) -> None:
        """Record a forward of prompts: row `start + i` is the batch row `source[i]`, with `longest` positions."""
        choices = self.take_choices()
        self._widen(longest)
        self._recorded[start : start + len(source), :longest] = choices.view(-1, longest, *choices.shape[1:])[source]

    def append(self, lengths: torch.Tensor, longest: int) -> None:
        """Record a forward of one token of each of the first rows, at positions `lengths` [B] int64, all <= longest."""
        self._widen(longest + 1)
        self._recorded[torch.arange(len(lengths), device=self._device), lengths] = self.take_choices()

    def take(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return [sum of counts, layers, choices] on the CPU: the experts of the first `counts` positions of rows."""
        width = int(counts.max())
        mask = torch.arange(width, device=self._device) < counts.unsqueeze(1)
        return self._recorded[rows, :width][mask].cpu()

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows `sources` [M] over rows `targets` [M]."""
        self._recorded.index_copy_(0, targets, self._recorded.index_select(0, sources))

    def _widen(self, columns: int) -> None:
        while columns > self._recorded.shape[1]:
            self._recorded = torch.cat([self._recorded, torch.zeros_like(self._recorded)], 1)
