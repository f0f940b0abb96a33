"""Hooks of this plugin: the training engine `fsdp`, its optimizers, and health checks. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, Kind, hookimpl
from areal_fsdp.kinds import OPTIMIZERS

_OF_A_MODEL = {
    "train": "how the engine computes its batches: packed, mixers or rows, the fastest first",
    "adapter": "the matrices that `adapter: {}` adapts",
    "parallel": "whether ranks can divide its layers (parallel.tensor) and its experts (parallel.expert)",
}


@hookimpl
def areal_train_engines() -> list[Component]:
    """Return the training engine."""
    return [
        Component(
            "fsdp",
            "trains any Hugging Face causal model with FSDP2, on one CPU process or on many GPUs",
            target="areal_fsdp.engine:FSDPEngine",
            config="areal_fsdp.config:FSDPConfig",
        )
    ]


@hookimpl
def areal_add_kinds() -> list[Kind]:
    """Add optimizers of this engine, which other plugins may supply too."""
    return [OPTIMIZERS]


@hookimpl
def areal_add_hooks() -> object:
    """Add the hook that supplies optimizers."""
    from areal_fsdp import hooks

    return hooks


@hookimpl
def areal_fsdp_optimizers() -> list[Component]:
    """Return the optimizers beside the engine's own AdamW."""
    return [
        Component(
            "muon",
            "Muon for the matrices of layers, AdamW for all other parameters",
            target="areal_fsdp.optimizers:muon",
            config="areal_fsdp.optimizer_settings:MuonSettings",
        ),
        Component(
            "adamw_8bit",
            "torchao's AdamW with moments of 8 bits",
            target="areal_fsdp.optimizers:adamw_8bit",
            config="areal_fsdp.optimizer_settings:AdamW8bitSettings",
        ),
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Return health checks of attention kernels, of NCCL, and of models."""
    kernel = "the attention kernel that `attention_kernel: auto` chooses for training on this machine"
    return [
        HealthCheck("attention", kernel, target="areal_fsdp.health:check_attention"),
        HealthCheck("nccl", "ranks on GPUs can communicate", target="areal_fsdp.health:check_nccl"),
        *(
            HealthCheck(name, meaning, target=f"areal_fsdp.model_checks:check_{name}", of_model=True)
            for name, meaning in _OF_A_MODEL.items()
        ),
    ]
