"""Which experts the tokens of live requests go through, noted where the model's routers choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError
from areal_core.models import MoEShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COLUMNS = 32
"""Positions that there is room for at first; the room is doubled as rows grow."""


class RoutedExperts:
    """The choices of every live row by position: rows as those of `Rows`, positions as those of its cache.

    A position's are noted when it is computed first; a cache that is rebuilt under new weights changes nothing, for the
    tokens that followed were sampled by the choices before.

    Args:
        model: whose routers are listened to from now on.
        capacity: rows.

    Raises:
        RunError: it is no MoE whose routers are known.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.moe = MoEShape.of(model.config.to_dict())
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if len(routers) != len(self.moe.layers):
            raise RunError(
                f"{len(self.moe.layers)} layers of the model should have experts, and {len(routers)} have a router",
                hints=["set inference_engine.routed_experts to false"],
            )
        for router in routers:
            router.register_forward_hook(self._note)
        self._made: list[torch.Tensor] = []
        self._capacity, self._device = capacity, model.device
        self.reset()

    def reset(self) -> None:
        """Give the memory of rows that are gone back."""
        dtype = getattr(torch, self.moe.dtype)
        self._noted = torch.zeros(self._capacity, _COLUMNS, *self.moe.shape, dtype=dtype, device=self._device)

    def _note(self, router: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        self._made.append(output[2])

    def take_made(self) -> torch.Tensor:
        """[T, layers, choices], counted from 1: those of the last forward's T tokens, padding included."""
        made = torch.stack(self._made, 1) + 1
        self._made.clear()
        return made.to(self._noted.dtype)

    def fill(self, start: int, source: torch.Tensor, longest: int) -> None:
        """Note a forward of prompts: row `start + i` has those of its batch row `source[i]`, of `longest` positions."""
        made = self.take_made()
        self._widen(longest)
        self._noted[start : start + len(source), :longest] = made.view(-1, longest, *made.shape[1:])[source]

    def append(self, lengths: torch.Tensor, longest: int) -> None:
        """Note a forward of one token for each of the first rows, at positions `lengths` [B] int64, all <= longest."""
        self._widen(longest + 1)
        self._noted[torch.arange(len(lengths), device=self._device), lengths] = self.take_made()

    def take(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[sum of counts, layers, choices] on the CPU: of the first positions of some rows, as many as `counts`."""
        width = int(counts.max())
        mask = torch.arange(width, device=self._device) < counts.unsqueeze(1)
        return self._noted[rows, :width][mask].cpu()

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows `sources` [M] over rows `targets` [M]."""
        self._noted.index_copy_(0, targets, self._noted.index_select(0, sources))

    def _widen(self, columns: int) -> None:
        while columns > self._noted.shape[1]:
            self._noted = torch.cat([self._noted, torch.zeros_like(self._noted)], 1)
