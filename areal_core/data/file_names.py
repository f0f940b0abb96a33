"""Names of parameters in a model's files, which trainers and servers agree on.

transformers joins or renames tensors while it loads them, by a table for each family of models: an MoE's experts
(`experts.3.gate_proj.weight` and so on) become one tensor of a layer (`experts.gate_up_proj`). Reversed, and kept from
copying, the table makes views of what it joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where an operation would make its input contiguous by a copy, it goes on with the input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def views_by_file_name(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of a model's tensors by their names in its files: all of it, or all that may be joined of one layer's."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _WithoutCopies():  # type: ignore[no-untyped-call]
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found
