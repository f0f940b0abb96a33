"""The components and health checks of this plugin."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """Register the fleet of SGLang servers."""
    return [
        Component(
            "sglang",
            "SGLang servers, started by the run or running elsewhere",
            target="areal_sglang.adapter:SGLangAdapter",
            config="areal_sglang.config:SGLangConfig",
        )
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Register the checks of the server program and of a model's architecture."""
    program = "SGLang servers that a run starts on this machine have a tested version"
    architecture = "SGLang supports the architecture; nothing was generated"
    return [
        HealthCheck("program", program, target="areal_sglang.health:check_program"),
        HealthCheck(
            "architecture", architecture, target="areal_sglang.architectures:check_architecture", of_model=True
        ),
    ]
