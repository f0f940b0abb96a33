"""What this plugin supplies: the training engine `fsdp`. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


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
