"""Hooks of this plugin: the training engine `fsdp`, and health checks. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl

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
