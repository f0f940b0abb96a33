"""`areal PLUGIN COMMAND ...`: commands that plugins bring."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from areal_core.cli.output import say
from areal_core.errors import PluginBrokenError, PluginMissingError, UsageError
from areal_core.plugins import PluginManager
from areal_core.plugins.records import normalise

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_plugin_command(plugin: str, words: Sequence[str], core_commands: Sequence[str]) -> int:
    """Load one plugin, call the command that the next word names, and return its exit code."""
    manager = PluginManager()
    try:
        manager.add([plugin])
    except PluginMissingError as error:
        near = difflib.get_close_matches(plugin, [*core_commands, *manager.catalog.names()], n=1)
        meant = [f"did you mean 'areal {near[0]}'?"] if near else []
        raise UsageError(
            f"areal has no command '{plugin}', and {error.message}",
            hints=(*meant, *error.hints[:-1], f"commands: {', '.join(core_commands)}", *error.hints[-1:]),
        ) from None
    own = [command for command in manager.commands() if command.plugin == normalise(plugin)]
    listing = "\n".join(f"  {command.name:<20} {command.summary}" for command in own)
    if not words or words[0] in {"-h", "--help"}:
        say(f"commands of the plugin {plugin}:\n{listing}" if own else f"the plugin {plugin} has no commands")
        return 0 if words else 2
    if not own:
        raise UsageError(f"the plugin {plugin} has no commands", hints=(f"see what it has: areal plugins {plugin}",))
    command = manager.find_command(normalise(plugin), words[0])
    target = manager.import_from(command, command.target)
    if not callable(target):
        raise PluginBrokenError(f"the command '{command.reference}' of {command.supplier} cannot be called")
    code = target(list(words[1:]))
    return code if isinstance(code, int) else 0
