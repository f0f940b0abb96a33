"""Components of this plugin: a workflow with images, and a small task and model to test it. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """Workflows with images."""
    return [
        Component(
            "single_turn",
            "one prompt with images and one answer, scored by the run's reward functions",
            target="areal_vision.workflow:VisionTurn",
            config="areal_vision.config:VisionTurnSettings",
        )
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """Data sets with images."""
    return [
        Component(
            "squares",
            "images of a colored square, with questions about its color or its position",
            target="areal_vision.squares:Squares",
            config="areal_vision.config:SquaresSettings",
        )
    ]


@hookimpl
def areal_models() -> list[Component]:
    """Models for tests and examples."""
    return [
        Component(
            "tiny_model",
            "an untrained vision-language model of Qwen3-VL's architecture with 0.2 M parameters",
            target="areal_vision.tiny_model:TinyModel",
            config="areal_vision.config:TinyModelSettings",
        )
    ]
