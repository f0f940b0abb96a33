"""Parameters under the names of a model's files, where transformers joins or renames tensors while it loads them.

An MoE's files have a matrix for each expert (`experts.3.gate_proj.weight`), as servers read them, and the model in
memory one tensor for all of a layer (`experts.gate_up_proj`, [experts, 2 x intermediate, hidden]). transformers has a
table for each family of models; reversed, and kept from copying, it makes views of what it joined.
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
    """Parameters of a model under the names and in the shapes of its files.

    Args:
        model: loaded by transformers.
        parameters: name in memory and whole tensor, in the model's order. They are asked for one by one; and layer by
            layer, of a model whose tables join tensors, for a tensor of its files may be made from several.
    """
    conversions = getattr(model, "_weight_conversions", None) or ()
    joins = any(isinstance(conversion, loading.WeightConverter) for conversion in conversions)
    for _, together in groupby(parameters, lambda named: layer_of(named[0]) if joins else named[0]):
        yield from ((name, tensor.contiguous()) for name, tensor in views_by_file_name(model, dict(together)).items())


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to; its own name where it is no layer's."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a tensor of the files lies in a parameter.

    Attributes:
        row: the index along the parameter's first dimension, to which all of it belongs.
        shape, stride: as of `torch.Tensor`.
        offset: in elements, from the row's beginning.
    """

    row: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, rows: torch.Tensor, first: int) -> torch.Tensor | None:
        """The view of it in contiguous `rows`, the parameter's from `first` on; None where it is in none of them."""
        if not first <= self.row < first + len(rows):
            return None
        start = rows.storage_offset() + (self.row - first) * rows.stride(0) + self.offset
        return rows.as_strided(self.shape, self.stride, start)


def pieces_of(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> dict[str, Piece] | None:
    """By name in the files, what lies where in a parameter that transformers joins from them.

    Returns:
        None where that cannot be said: a piece is no view of the parameter, or stands in several of its rows.
    """
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    found: dict[str, Piece] = {}
    row = math.prod(whole.shape[1:])
    for key, view in views_by_file_name(model, {name: whole}).items():
        last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if (
            view.untyped_storage()._cdata != whole.untyped_storage()._cdata
            or view.storage_offset() // row != last // row
        ):
            return None
        number, offset = divmod(int(view.storage_offset()), row)
        found[key] = Piece(number, tuple(view.shape), view.stride(), offset)
    complete = sum(math.prod(piece.shape) for piece in found.values()) == whole.numel()
    return found if complete and name not in found else None


def own_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank has of a parameter that is divided along its first dimension, and the number of its first row."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    place: Any = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), int(place[1][0])
