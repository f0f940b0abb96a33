"""What this plugin supplies."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_inference_engines() -> list[Component]:
    """A fleet of SGLang servers."""
    return [
        Component(
            "sglang",
            "SGLang servers: started by the run, or running elsewhere",
            target="areal_sglang.engine:SGLangEngine",
            config="areal_sglang.config:SGLangConfig",
        )
    ]
