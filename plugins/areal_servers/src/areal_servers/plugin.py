"""What this plugin supplies: the command that starts a server by hand. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Command, hookimpl


@hookimpl
def areal_commands() -> list[Command]:
    """`areal serve`, `areal servers serve`."""
    summary = "start an inference server, for a run in progress or by itself"
    return [Command("serve", summary, target="areal_servers.command:main")]
