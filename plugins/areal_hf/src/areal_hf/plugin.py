"""What this plugin supplies."""

from __future__ import annotations

from areal_core.plugins import Command, Component, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """The embedded engine."""
    return [
        Component(
            "hf",
            "any Hugging Face causal model, generated from in a process of its own on the CPU or one GPU",
            target="areal_hf.engine:HFEngine",
            config="areal_hf.config:HFConfig",
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """`areal debug`, `areal hf debug`."""
    return [Command("debug", "take one row from prompt to loss in this process", target="areal_hf.debug:main")]
