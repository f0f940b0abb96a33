"""What this plugin supplies."""

from __future__ import annotations

from areal_core.plugins import Component, HealthCheck, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """A fleet of SGLang servers."""
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
    """Of the server program."""
    meaning = "servers that a run starts on this machine are of a version that was tested"
    registered = "SGLang has registered the architecture; nothing was generated"
    return [
        HealthCheck("program", meaning, target="areal_sglang.health:check_program"),
        HealthCheck("architecture", registered, target="areal_sglang.architectures:check_architecture", of_model=True),
    ]
