"""What this plugin supplies: fine-tuning, whole and in parts. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_algorithms() -> list[Component]:
    """What is learnt from a data set as it is."""
    return [
        Component(
            "sft",
            "supervised fine-tuning on what the rows of a data set say",
            target="areal_finetuning.supervised:Supervised",
            config="areal_finetuning.config:SupervisedSettings",
        )
    ]


@hookimpl
def areal_encoders() -> list[Component]:
    """From a row to tokens."""
    return [
        Component(
            "conversations",
            "rows with messages, or with prompt and completion: what the assistant says is learnt",
            target="areal_finetuning.encoders:conversations",
        )
    ]
