"""Map a model's parameters to the tensors of its files, which transformers renames or joins while it loads them.

An MoE's files have a matrix for each expert (`experts.3.gate_proj.weight`), which servers read. The loaded model has
one tensor for all experts of a layer (`experts.gate_up_proj`, [experts, 2 x intermediate, hidden]). transformers has a
conversion table for each family of models; reversed, the table makes views of the joined tensors without a copy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import core_model_loading as _loading

from areal_core.models import views_by_file_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedModel

loading: Any = _loading
_LAYER = re.compile(r".*?\.\d+\.")


def named_as_in_files(
    model: PreTrainedModel, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's files, by name.

    Args:
        model: the model as transformers loaded it.
        parameters: name in the model and whole tensor, in the model's order. They are consumed one by one, or layer by
            layer if the model's table joins tensors: then a tensor of the files may come from several parameters.
    """
    conversions = getattr(model, "_weight_conversions", None) or ()
    joins = any(isinstance(conversion, loading.WeightConverter) for conversion in conversions)
    for _, together in groupby(parameters, lambda named: layer_of(named[0]) if joins else named[0]):
        yield from ((name, tensor.contiguous()) for name, tensor in views_by_file_name(model, dict(together)).items())


def layer_of(name: str) -> str:
    """Return the prefix of the layer that a parameter belongs to, or the parameter's name if it is outside layers."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name


@dataclass(frozen=True, slots=True)
class Piece:
    """Position of a tensor of the files inside a parameter.

    Attributes:
        row: index along the parameter's first dimension; the tensor lies inside this row.
        shape: see `torch.Tensor`.
        stride: see `torch.Tensor`.
        offset: elements between the beginning of the row and the tensor.
    """

    row: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, rows: torch.Tensor, first: int) -> torch.Tensor | None:
        """Return the tensor as a view of contiguous `rows`, the parameter's from `first` on; None if it is outside."""
        if not first <= self.row < first + len(rows):
            return None
        start = rows.storage_offset() + (self.row - first) * rows.stride(0) + self.offset
        return rows.as_strided(self.shape, self.stride, start)


def pieces_of(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> dict[str, Piece] | None:
    """Return the tensors of the files that transformers joins to a parameter, by name.

    Returns:
        None if a tensor is not a view of the parameter, or spans several of its rows.
    """
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    pieces: dict[str, Piece] = {}
    row = math.prod(whole.shape[1:])
    for key, view in views_by_file_name(model, {name: whole}).items():
        last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if (
            view.untyped_storage()._cdata != whole.untyped_storage()._cdata
            or view.storage_offset() // row != last // row
        ):
            return None
        number, offset = divmod(int(view.storage_offset()), row)
        pieces[key] = Piece(number, tuple(view.shape), view.stride(), offset)
    complete = sum(math.prod(piece.shape) for piece in pieces.values()) == whole.numel()
    return pieces if complete and name not in pieces else None


def own_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows of a parameter that is sharded along its first dimension, and the first row's index."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return parameter.to_local().detach(), int(offsets[0])
