"""Command of this plugin. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, hookimpl


@hookimpl
def areal_commands() -> list[Command]:
    """The command `areal convert`."""
    return [
        Command("convert", "convert one of AReaL's configs to an areal config", target="areal_convert.command:main")
    ]
