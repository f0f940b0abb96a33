"""What this plugin supplies: the training engine `fsdp`. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_train_engines() -> list[Component]:
    """The training engine, as a record."""
    return [
        Component(
            "fsdp",
            "trains any Hugging Face causal model, sharded by FSDP2; one CPU process to many GPUs",
            target="areal_fsdp.engine:FSDPEngine",
            config="areal_fsdp.config:FSDPConfig",
        )
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Of the attention kernels, and of what ranks talk through."""
    kernel = "the attention kernel that `attention_kernel: auto` takes in training on this machine"
    return [
        HealthCheck("attention", kernel, target="areal_fsdp.health:check_attention"),
        HealthCheck("nccl", "ranks on GPUs can work together", target="areal_fsdp.health:check_nccl"),
    ]
