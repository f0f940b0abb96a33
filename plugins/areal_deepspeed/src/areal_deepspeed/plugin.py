"""Component of this plugin: the training engine `deepspeed`. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_train_engines() -> list[Component]:
    """The training engine `deepspeed`."""
    return [
        Component(
            "deepspeed",
            "trains any Hugging Face causal model with DeepSpeed's ZeRO 2 or 3, from an existing DeepSpeed JSON",
            target="areal_deepspeed.engine:DeepSpeedEngine",
            config="areal_deepspeed.config:DeepSpeedConfig",
        )
    ]
