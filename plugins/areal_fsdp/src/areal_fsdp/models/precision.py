"""The dtype in which each tensor of a model computes, as in transformers.

In bfloat16 some tensors stay in float32: tensors that the model's class makes so, such as the frequencies of rotary
embeddings, and tensors that it names in `_keep_in_fp32_modules_strict`, such as the router's bias of DeepSeek-V3. A
trained model is loaded in float32; this module determines the dtypes to which its tensors are rounded.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from transformers import core_model_loading as _loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

loading: Any = _loading
_BASE = ".base_layer."
"""Part of the name of a parameter with an adapter, which PEFT inserts."""


def stored_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that a model's files contain, by name."""
    return {
        f"{module_name}.{name}".lstrip("."): buffer
        for module_name, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def round_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round all buffers and frozen parameters of a model that computes in `dtype`, in place."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    fixed = dict(model.named_buffers()) | frozen
    in_float32 = {name: tensor for name, tensor in fixed.items() if tensor.dtype == torch.float32}
    if not in_float32 or dtype == torch.float32:
        return
    dtypes = _loaded_dtypes(model, dtype)
    for name, tensor in in_float32.items():
        tensor.data = tensor.data.to(dtypes.get(name.replace(_BASE, "."), tensor.dtype))


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that stay in float32 if the model computes in `dtype`, by name; none for float32."""
    if dtype == torch.float32:
        return {}
    dtypes = _loaded_dtypes(model, dtype)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if dtypes.get(name.replace(_BASE, ".")) == torch.float32
    }


def _loaded_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of the model that transformers loads in `dtype`, by name."""
    kind: Any = type(model)
    with torch.device("meta"):
        empty = kind._from_config(deepcopy(model.config), dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in empty.named_buffers(remove_duplicate=False)}
    stored = {name: tensor.dtype for name, tensor in empty.state_dict().items()}
    if plan := empty._get_dtype_plan(dtype):  # applies only to tensors in files
        pattern, names, _ = loading.build_glob_alternation(list(plan))
        for name in stored:
            if (match := pattern.search(name)) is not None:
                stored[name] = plan[names[match.lastgroup]]
    return dtypes | stored
