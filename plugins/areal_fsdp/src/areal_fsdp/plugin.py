"""What this plugin supplies: the training engine `fsdp`, and health checks. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl

_OF_A_MODEL = {
    "train": "how it is trained: packed, mixers or rows, the fastest first",
    "adapter": "what `adapter: {}` is on",
    "parallel": "whether ranks can divide its layers (parallel.tensor) and its experts (parallel.expert)",
}


@hookimpl
def areal_train_engines() -> list[Component]:
    """The training engine, as a record."""
    return [
        Component(
            "fsdp",
            "trains any Hugging Face causal model, sharded with FSDP2, on anything from one CPU process to many GPUs",
            target="areal_fsdp.engine:FSDPEngine",
            config="areal_fsdp.config:FSDPConfig",
        )
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Of the attention kernels, of what ranks talk through, and of a model."""
    kernel = "the attention kernel that `attention_kernel: auto` takes in training on this machine"
    return [
        HealthCheck("attention", kernel, target="areal_fsdp.health:check_attention"),
        HealthCheck("nccl", "ranks on GPUs can work together", target="areal_fsdp.health:check_nccl"),
        *(
            HealthCheck(name, meaning, target=f"areal_fsdp.model_checks:check_{name}", of_model=True)
            for name, meaning in _OF_A_MODEL.items()
        ),
    ]
