"""The components, commands and health checks of this plugin."""

from __future__ import annotations

from areal_core.plugins import Command, Component, HealthCheck, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """Register the embedded engine."""
    return [
        Component(
            "hf",
            "generates with any Hugging Face causal model in separate processes, on the CPU or one GPU each",
            target="areal_hf.adapter:HFAdapter",
            config="areal_hf.config:HFConfig",
        )
    ]


@hookimpl
def areal_commands() -> list[Command]:
    """Register `areal debug` (`areal hf debug`)."""
    return [Command("debug", "take one row from prompt to loss in this process", target="areal_hf.debug:main")]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Register the check of a model."""
    meaning = "how the embedded engine generates: rows, cohorts or whole, the fastest first"
    return [HealthCheck("generate", meaning, target="areal_hf.model_checks:check_generate", of_model=True)]
