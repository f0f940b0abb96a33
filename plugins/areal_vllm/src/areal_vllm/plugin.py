"""The components and health checks of this plugin."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """Register the fleet of vLLM servers."""
    return [
        Component(
            "vllm",
            "vLLM servers, started by the run or running elsewhere",
            target="areal_vllm.adapter:VLLMAdapter",
            config="areal_vllm.config:VLLMConfig",
        )
    ]


@hookimpl
def areal_health_checks() -> list[HealthCheck]:
    """Register the checks of the server program and of a model's architecture."""
    program = "vLLM servers that a run starts on this machine have a tested version"
    architecture = "vLLM supports the architecture; nothing was generated"
    return [
        HealthCheck("program", program, target="areal_vllm.health:check_program"),
        HealthCheck("architecture", architecture, target="areal_vllm.architectures:check_architecture", of_model=True),
    ]
