"""`areal PLUGIN COMMAND ...`: commands that plugins bring; `areal COMMAND ...` where only one plugin has it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, cast

from areal_core.cli.output import print_out
from areal_core.errors import UsageError
from areal_core.plugins import PluginManager
from areal_core.plugins.catalog import SUPPLIERS
from areal_core.plugins.manager import survey
from areal_core.plugins.records import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.plugins import Command
    from areal_core.plugins.catalog import Catalog


def run_plugin_command(word: str, rest: Sequence[str], core_commands: Sequence[str]) -> int:
    """Call the command that the words name, in full or without its plugin, and return its exit code.

    Raises:
        UsageError: the first word is neither a plugin nor a command of exactly one, or the plugin has no commands.
        PluginError: the plugin is broken, or has no command of this name.
    """
    manager = PluginManager()
    plugin = normalize(word)
    if plugin not in manager.catalog.names():
        command = _only_command(manager.catalog, word, core_commands)
        manager.add([command.plugin])
        return _call(manager, command, rest)
    manager.add([plugin])
    own = [record for kind, record in manager.records() if kind == "commands" and record.plugin == plugin]
    if plugin in [record.name for record in own]:
        return _call(manager, manager.find_command(plugin, plugin), rest)
    if not rest or rest[0] in {"-h", "--help"}:
        listing = "\n".join(f"  {command.name:<20} {command.summary}" for command in own)
        print_out(f"commands of the plugin {word}:\n{listing}" if own else f"the plugin {word} has no commands")
        return 0 if rest else 2
    if not own:
        raise UsageError(f"the plugin {word} has no commands", hints=(f"see what it has: areal plugins {word}",))
    return _call(manager, manager.find_command(plugin, rest[0]), rest[1:])


def _only_command(catalog: Catalog, word: str, core_commands: Sequence[str]) -> Command:
    """The command of this name, if exactly one installed plugin has it; plugins that are broken have none."""
    records = [each for plugin in survey(catalog) for each in plugin.records]
    commands = cast("list[Command]", [record for kind, record in records if kind == "commands"])
    matches = [command for command in commands if command.name == normalize(word)]
    if len(matches) > 1:
        raise UsageError(
            f"the command '{word}' is supplied by {' and by '.join(command.supplier for command in matches)}",
            hints=(f"write {' or '.join(f'areal {command.plugin} {command.name}' for command in matches)}",),
        )
    if not matches:
        supplier = SUPPLIERS.get(("commands", normalize(word)))
        missing = catalog.missing([supplier or word])
        known = [*core_commands, *catalog.names(), *(command.name for command in commands)]
        near = [f"did you mean 'areal {name}'?" for name in difflib.get_close_matches(word, known, n=1) if not supplier]
        raise UsageError(
            f"areal has no command '{word}', and {missing.message}",
            hints=(*near, *missing.hints[:-1], f"commands: {', '.join(core_commands)}", *missing.hints[-1:]),
        )
    return matches[0]


def _call(manager: PluginManager, command: Command, words: Sequence[str]) -> int:
    target: Any = manager.import_from(command, command.target)
    code = target(list(words))
    return code if isinstance(code, int) else 0
