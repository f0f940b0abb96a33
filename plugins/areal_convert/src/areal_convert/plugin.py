"""What this plugin supplies: one command. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, hookimpl


@hookimpl
def areal_commands() -> list[Command]:
    """`areal convert areal CONFIG`."""
    return [
        Command("convert", "convert one of AReaL's configs to an areal config", target="areal_convert.command:main")
    ]
