"""Sharding a model over ranks by FSDP2."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
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

from areal_core.errors import RunError
from areal_core.models import is_vlm
from areal_fsdp.attention.hugging_face import kernel_head_size
from areal_fsdp.attention.kernels import choose_kernel
from areal_fsdp.models.precision import kept_in_float32, stored_buffers
from areal_fsdp.parallel.context import Context
from areal_fsdp.parallel.experts import divide_experts, moe_blocks
from areal_fsdp.parallel.file_names import named_as_in_files
from areal_fsdp.parallel.tensor import beside_text, decoder_layers, divide_layers, divide_vocabulary
from areal_fsdp.planning.decoder import experts_of, head_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.lora.adapter import Adapter
    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.parallel.loading import ModelFiles
    from areal_fsdp.parallel.mesh import Ranks


def shard(
    module: RoleModule, ranks: Ranks, config: FSDPConfig, dtype: torch.dtype, files: ModelFiles | None = None
) -> list[tuple[torch.nn.Parameter, DeviceMesh]]:
    """Shard each layer, and the other parameters with the root; collective.

    Gradients are summed over ranks in float32, not averaged. Parameters that stay in float32 while the model computes
    in `dtype` are few and small, and every rank has them whole: FSDP gathers all parameters of a layer in one dtype.

    Args:
        module: the module around the model, on the CPU or the meta device.
        ranks: the process groups.
        config: the engine's settings.
        dtype: dtype of the computation.
        files: files that the shards are read from; None if the parameters are loaded.

    Returns:
        Parameters that each rank of the given mesh has whole, with a part of the gradient: the caller must sum these
        gradients over the mesh.

    Raises:
        RunError: the model does not support the parallelism in `config`.
    """
    mesh, model, partial = ranks.shards, module.model, list[str]()
    assert mesh is not None
    if is_vlm(model.config):
        config.parallel.refuse_images(model.config.model_type)
    if ranks.context is not None:
        module.context = Context(ranks.context)
    if ranks.tensor is not None:
        partial = divide_layers(model, decoder_layers(model), ranks.tensor)
        module.vocabulary = divide_vocabulary(model, ranks.tensor)
    offloads = config.offload_parameters and mesh.device_type != "cpu"
    kept = kept_in_float32(model, dtype)
    _refuse_divided(model, kept)
    # Inputs of layers are not cast, as in transformers: some models have a float32 residual stream.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        "ignored_params": set(kept.values()),
    }
    if ranks.experts is not None:
        divide_experts(model, ranks.experts["experts"])
        names = ranks.experts.mesh_dim_names or ()
        for experts in moe_blocks(model):  # sharded over fewer ranks than the other parameters
            fully_shard(experts, **options | {"mesh": ranks.experts[names[:-1]]})
    for part in (*_beside_text(module), *decoder_layers(module.model)):
        fully_shard(part, **options)
    fully_shard(module, **options | {"mp_policy": replace(precision, cast_forward_inputs=True)})  # images
    for name in ("unpacked", "head_state"):
        register_fsdp_forward_method(module, name)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo does not support PREMUL_SUM
    device = torch.device(mesh.device_type)
    for parameter in kept.values():
        if not parameter.is_meta:
            parameter.data = parameter.to(device)
    if files is not None:
        files.fill(module, model, torch.device("cpu") if offloads else device, device)
    parameters = dict(model.named_parameters())
    dimensions = [mesh[name] for name in mesh.mesh_dim_names or ()]
    return [
        *((parameters[name], ranks.tensor) for name in partial if ranks.tensor is not None),
        *((parameters[name], dimension) for name in kept for dimension in dimensions),
    ]


def _beside_text(module: RoleModule) -> list[torch.nn.Module]:
    """Return the largest unused submodules of a model; as parts of the root, each forward pass would gather them."""
    unused = set() if module.vision is not None else {*beside_text(module.model).values()}

    def parts_of(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
        parameters = {*part.parameters()}
        if parameters and parameters <= unused:
            yield part
        elif parameters & unused:
            for child in part.children():
                yield from parts_of(child)

    return list(parts_of(module.model))


def _refuse_divided(model: PreTrainedModel, kept: Mapping[str, torch.Tensor]) -> None:
    if divided := [name for name, parameter in kept.items() if isinstance(parameter, DTensor)]:
        raise RunError(
            f"model type {model.config.model_type} keeps '{divided[0]}' in float32, and tensor parallelism splits it",
            hints=["set train_engine.parallel.tensor to 1; more ranks work for every model"],
        )


def whole_of(parameter: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a whole tensor; collective.

    A sharded tensor is gathered on `device` in `dtype`: its shards may be float32 masters. Any other tensor is returned
    unchanged.
    """
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    moved: Any = tensor.to(device, dtype)  # from host memory, if parameters are offloaded
    whole: torch.Tensor = moved.full_tensor()
    return whole


def shape_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the shape and dtype that `whole_of` returns, on the device `meta`; not collective."""
    held = dtype if isinstance(parameter, DTensor) else parameter.dtype
    return torch.empty(parameter.shape, dtype=held, device="meta")


def full_parameters(
    model: PreTrainedModel, adapter: Adapter | None, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and stored buffers with the names of the model's files, with the adapter merged.

    Parameters with float32 masters have the dtype of the computation.

    Args:
        model: the model, sharded or not.
        adapter: the model's adapter, or None.
        whole: `whole_of` or `shape_of`; may be collective.
    """
    parameters = ((name, whole(parameter)) for name, parameter in model.named_parameters())
    buffers = ((name, whole(buffer)) for name, buffer in stored_buffers(model).items())
    return named_as_in_files(model, chain(parameters if adapter is None else adapter.merged(whole), buffers))


def synced_parameters(
    model: PreTrainedModel, adapter: Adapter | None, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a weight sync: the adapter if it is synced alone, otherwise `full_parameters`."""
    if adapter is not None and adapter.is_synced_alone and adapter.is_on:
        return adapter.alone(whole)
    return full_parameters(model, adapter, whole)


def choose_attention(text: Any, config: FSDPConfig, device: torch.device, *, has_kernels: bool) -> str:
    """Choose the attention kernel for a rank's heads.

    Args:
        text: the model's text config.
        config: the engine's settings.
        device: the rank's device.
        has_kernels: True if device and dtype support kernels.

    Returns:
        The kernel's name; empty without kernels or attention.

    Raises:
        RunError: the ranks do not divide the heads or the experts, or the kernel in the settings does not work.
    """
    heads = getattr(text, "num_attention_heads", 0)  # a model may have no attention
    rank_heads, rank_key_heads = config.parallel.heads(heads, getattr(text, "num_key_value_heads", None) or heads)
    config.parallel.experts(experts_of(text.to_dict()))
    if not has_kernels or not heads:
        return ""
    head_size = kernel_head_size(*head_sizes(text.to_dict()))
    return choose_kernel(config.attention_kernel, rank_heads, rank_key_heads, head_size, device)
