"""What this plugin supplies: a workflow with images, and a small task to see it learn. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_workflows() -> list[Component]:
    """How a prompt with images is played."""
    return [
        Component(
            "single_turn",
            "a prompt with images, one answer, one score",
            target="areal_vision.workflow:VisionTurn",
            config="areal_vision.config:VisionTurnSettings",
        )
    ]


@hookimpl
def areal_datasets() -> list[Component]:
    """A task that needs both the image and the question."""
    return [
        Component(
            "squares",
            "a colored square somewhere in an image, and a question about its color or its side",
            target="areal_vision.squares:Squares",
            config="areal_vision.config:SquaresSettings",
        )
    ]


@hookimpl
def areal_models() -> list[Component]:
    """A model that is small enough for it."""
    return [
        Component(
            "tiny_model",
            "a vision-language model of Qwen3-VL's shape, 0.2 M parameters, that knows nothing yet",
            target="areal_vision.tiny_model:TinyModel",
            config="areal_vision.config:TinyModelSettings",
        )
    ]
