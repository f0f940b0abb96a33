"""Sharding a model over ranks by FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from areal_fsdp.attention.kernels import choose_kernel
from areal_fsdp.parallel.context import Context
from areal_fsdp.parallel.experts import divide_experts, moe_blocks
from areal_fsdp.parallel.file_names import named_as_in_files
from areal_fsdp.parallel.tensor import decoder_layers, divide_layers, divide_vocabulary
from areal_fsdp.planning.decoder import experts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.lora.adapter import Adapter
    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.parallel.loading import ModelFiles
    from areal_fsdp.parallel.mesh import Ranks


def shard(
    module: RoleModule, ranks: Ranks, config: FSDPConfig, dtype: torch.dtype, files: ModelFiles | None = None
) -> list[torch.nn.Parameter]:
    """Shard each layer, and the rest with the root; and read the shards from `files`, where the model is still there.

    Gradients are summed over ranks, in float32, not averaged.

    Raises:
        RunError: the model cannot be divided so.

    Returns:
        The parameters whose gradients are to be summed over `ranks.tensor` besides.
    """
    mesh, model, partial = ranks.shards, module.model, list[str]()
    assert mesh is not None
    if module.vision is not None:
        config.parallel.refuse_images(model.config.model_type)
    if ranks.context is not None:
        module.context = Context(ranks.context)
    if ranks.tensor is not None:
        partial = divide_layers(model, decoder_layers(model), ranks.tensor)
        module.vocabulary = divide_vocabulary(model, ranks.tensor)
    offloads = config.offload_parameters and mesh.device_type != "cpu"
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
    }
    if ranks.experts is not None:
        divide_experts(model, ranks.experts["experts"])
        names = ranks.experts.mesh_dim_names or ()
        precision = replace(options["mp_policy"], cast_forward_inputs=False)
        own = {"mesh": ranks.experts[names[:-1]], "mp_policy": precision}
        for experts in moe_blocks(model):  # over fewer ranks than the rest; the router's weights are not rounded
            fully_shard(experts, **options | own)
    for layer in decoder_layers(module.model):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    for name in ("unpacked", "head_state"):
        register_fsdp_forward_method(module, name)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    if files is not None:
        files.fill(module, model, torch.device("cpu" if offloads else mesh.device_type))
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in partial]


def whole_of(parameter: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """All of a parameter, in a dtype; collective where ranks share it, and then on `device`."""
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        moved: Any = tensor.to(device, dtype)  # from host memory, if parameters are offloaded
        tensor = moved.full_tensor()
    return tensor.to(dtype)


def shape_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `whole_of` gives, on the device `meta`: no rank takes part."""
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


def full_parameters(
    model: PreTrainedModel, adapter: Adapter | None, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, merged with the adapter; of masters these are what they were rounded to.

    Args:
        model: sharded.
        adapter: beside it.
        whole: makes a parameter of all ranks one tensor: `whole_of` or `shape_of`; may be collective.
    """
    if adapter is not None:
        return named_as_in_files(model, adapter.merged(whole))
    return named_as_in_files(model, ((name, whole(parameter)) for name, parameter in model.named_parameters()))


def synced_parameters(
    model: PreTrainedModel, adapter: Adapter | None, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """See `TrainEngine.named_full_parameters`: all, or an adapter that is synced alone; `whole` as `full_parameters`
    takes it."""
    if adapter is not None and adapter.is_synced_alone and adapter.is_on:
        return adapter.alone(whole)
    return full_parameters(model, adapter, whole)


def choose_attention(text: Any, config: FSDPConfig, device: torch.device, *, has_kernels: bool) -> str:
    """Choose the kernel for as many heads of attention as a rank has of the model of the text config `text`.

    Returns:
        Its name; empty where there are no kernels.

    Raises:
        RunError: ranks cannot divide the heads, or the experts.
    """
    heads = getattr(text, "num_attention_heads", 0)  # a model may have no attention
    own, own_key = config.parallel.heads(heads, getattr(text, "num_key_value_heads", None) or heads)
    config.parallel.experts(experts_of(text.to_dict()))
    if not has_kernels or not heads:
        return ""
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return choose_kernel(config.attention_kernel, own, own_key, head_size, device)
