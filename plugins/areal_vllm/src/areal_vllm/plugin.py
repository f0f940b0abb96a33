"""What this plugin supplies."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """A fleet of vLLM servers."""
    return [
        Component(
            "vllm",
            "vLLM servers: started by the run, or running elsewhere",
            target="areal_vllm.engine:VLLMEngine",
            config="areal_vllm.config:VLLMConfig",
        )
    ]
