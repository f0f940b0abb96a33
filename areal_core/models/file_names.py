"""Names of parameters in a model's files, which trainers and servers agree on.

transformers joins and renames tensors while it loads them, by a table for each family of models. The experts of an MoE
(`experts.3.gate_proj.weight` and so on), for example, become one tensor of a layer (`experts.gate_up_proj`). Reversed
and prevented from copying, the table gives views of the joined tensors.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import PreTrainedModel


def views_by_file_name(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of a model's tensors by their names in its files.

    Args:
        model: the model.
        tensors: its tensors by their names in the model: all of them, or all of one layer that are joined.

    Example:
        >>> from areal_core.models import views_by_file_name
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> sizes = {"hidden_size": 8, "moe_intermediate_size": 4, "num_attention_heads": 2, "vocab_size": 9}
        >>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, num_experts=2, **sizes))
        >>> joined = {name: value for name, value in model.named_parameters() if name.endswith("experts.down_proj")}
        >>> {name: list(value.shape) for name, value in joined.items()}
        {'model.layers.0.mlp.experts.down_proj': [2, 8, 4]}
        >>> {name: list(value.shape) for name, value in views_by_file_name(model, joined).items()}
        {'model.layers.0.mlp.experts.0.down_proj.weight': [8, 4],
         'model.layers.0.mlp.experts.1.down_proj.weight': [8, 4]}
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _without_copies()():
        views: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return views


@cache
def _without_copies() -> type[TorchDispatchMode]:
    """Return a mode in which an operation that would copy its input to make it contiguous returns the input."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))

    return WithoutCopies
