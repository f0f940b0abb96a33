"""A model in a role as the engine computes with it, with its adapter, before ranks divide it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from areal_fsdp.lora.adapter import install
from areal_fsdp.models.compiling import choose_products
from areal_fsdp.models.model import RoleModule, decoder_of, load_model
from areal_fsdp.models.routing import Routing

if TYPE_CHECKING:
    from areal_core.engines import ModelReference, OptimizerSettings
    from areal_core.sdk import Role
    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.lora.adapter import Adapter
    from areal_fsdp.parallel.loading import ModelFiles
    from areal_fsdp.planning.decoder import Decoder


class Loaded(NamedTuple):
    """What was read.

    Attributes:
        module: around the model.
        adapter: in it; None where it has none.
        files: where its parameters still are; None where they are here.
        decoder: its sizes without the adapter; None where its layers are not known.
        routing: what its routers share, where it is an MoE.
    """

    module: RoleModule
    adapter: Adapter | None
    files: ModelFiles | None
    decoder: Decoder | None
    routing: Routing


def load_role(
    model: ModelReference,
    role: Role,
    run: OptimizerSettings,
    config: FSDPConfig,
    *,
    compiled: bool,
    has_kernels: bool,
    in_parts: bool,
) -> Loaded:
    """Read a model for a role.

    Args:
        model, role: of `TrainEngine.setup`.
        run: what `setup` is told of the run.
        config: of the engine.
        compiled: whether layers and head will be.
        has_kernels: whether attention has, which take the same layout as compiled layers.
        in_parts: as of `load_model`.

    Raises:
        RunError: see `load_model` and `install`.
    """
    settings = config.adapter_of(role)
    read, files = load_model(model, role, compiled=compiled, in_parts=in_parts, frozen=settings is not None)
    decoder = decoder_of(read, role)
    routing = Routing(read, config.router_loss if role.trains else 0.0)
    choose_products(read, getattr(torch, model.dtype), compile_them=compiled)
    module = RoleModule(
        read,
        role,
        temperature=run.temperature,
        chunk_tokens=config.logprob_chunk_tokens,
        compiled=compiled,
        shows_images=run.shows_images,
        kernel="torch" if compiled or has_kernels else "",
    )
    adapter = None
    if settings is not None:
        adapter = install(read, settings, source=model.path, head=module.head_name, learns=role.changes)
        if files is not None:
            files.rename(adapter.meta_names())
    return Loaded(module, adapter, files, None if module.vision else decoder, routing)


def learning(module: RoleModule, adapter: Adapter | None) -> dict[str, torch.nn.Parameter]:
    """What changes in a role that learns, by name."""
    if adapter is not None:
        return adapter.parameters()
    return {name: parameter for name, parameter in module.model.named_parameters() if parameter.requires_grad}
