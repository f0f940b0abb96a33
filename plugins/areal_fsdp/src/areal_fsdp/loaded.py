"""Load a role's model, with its adapter, before the ranks shard it."""

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
    """A role's model.

    Attributes:
        module: the module around the model.
        adapter: the model's adapter; None if it has none.
        files: files that the parameters are still to be read from; None if they are loaded.
        decoder: the model's sizes without the adapter; None for unknown layers.
        routing: state that the routers of an MoE share.
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
    """Load a model for a role.

    Args:
        model: see `TrainEngine.setup`.
        role: see `TrainEngine.setup`.
        run: the run's settings from `TrainEngine.setup`.
        config: the engine's settings.
        compiled: True if layers and head will be compiled.
        has_kernels: True if attention uses kernels; these need the same layout as compiled layers.
        in_parts: see `load_model`.

    Raises:
        RunError: see `load_model` and `install`.
    """
    settings = config.adapter_of(role)
    loaded, files = load_model(model, role, compiled=compiled, in_parts=in_parts, frozen=settings is not None)
    decoder = decoder_of(loaded, role)
    routing = Routing(loaded, config.router_loss if role.trains else 0.0)
    choose_products(loaded, getattr(torch, model.dtype), compile_them=compiled)
    module = RoleModule(
        loaded,
        role,
        temperature=run.temperature,
        chunk_tokens=config.logprob_chunk_tokens,
        compiled=compiled,
        shows_images=run.shows_images,
        kernel="torch" if compiled or has_kernels else "",
    )
    adapter = None
    if settings is not None:
        adapter = install(loaded, settings, source=model.path, head=module.head_name, learns=role.changes)
        if files is not None:
            files.rename(adapter.meta_names())
    return Loaded(module, adapter, files, None if module.vision else decoder, routing)


def learning(module: RoleModule, adapter: Adapter | None) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that a role trains, by name: the adapter's, or those of the model that need a gradient."""
    if adapter is not None:
        return adapter.parameters()
    return {name: parameter for name, parameter in module.model.named_parameters() if parameter.requires_grad}
