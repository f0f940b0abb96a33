"""Command of this plugin. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, hookimpl


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal eval`, also available as `areal evaluation eval`."""
    return [Command("eval", "evaluate a model without training it", target="areal_evaluation.command:main")]
