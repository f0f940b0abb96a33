"""What this plugin supplies: the command that measures a model. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, hookimpl


@hookimpl
def areal_commands() -> list[Command]:
    """`areal eval`, `areal evaluation eval`."""
    return [Command("eval", "evaluate a model without training it", target="areal_evaluation.command:main")]
