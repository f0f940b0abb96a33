"""Run the commands of plugins: `areal PLUGIN COMMAND ...`, or `areal COMMAND ...` if only one plugin has it."""

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


def run_plugin_command(name: str, arguments: Sequence[str], core_commands: Sequence[str]) -> int:
    """Call a command of a plugin and return its exit code.

    Args:
        name: name of a plugin, or of a command that only one plugin has.
        arguments: the arguments after it. The first one after a plugin's name is the name of a command.
        core_commands: names of the core's commands, for hints.

    Raises:
        UsageError: no plugin or command has this name, several plugins have the command, or the plugin has no commands.
        PluginError: the plugin is broken, or has no command of this name.
    """
    manager = PluginManager()
    plugin = normalize(name)
    if plugin not in manager.catalog.names():
        command = _find_unique_command(manager.catalog, name, core_commands)
        manager.add([command.plugin])
        return _call(manager, command, arguments)
    manager.add([plugin])
    commands = [record for kind, record in manager.records() if kind == "commands" and record.plugin == plugin]
    if plugin in [record.name for record in commands]:
        return _call(manager, manager.find_command(plugin, plugin), arguments)
    if not arguments or arguments[0] in {"-h", "--help"}:
        listing = "\n".join(f"  {command.name:<20} {command.summary}" for command in commands)
        print_out(f"commands of the plugin {name}:\n{listing}" if commands else f"the plugin {name} has no commands")
        return 0 if arguments else 2
    if not commands:
        raise UsageError(f"the plugin {name} has no commands", hints=(f"see what it has: areal plugins {name}",))
    return _call(manager, manager.find_command(plugin, arguments[0]), arguments[1:])


def _find_unique_command(catalog: Catalog, name: str, core_commands: Sequence[str]) -> Command:
    """Return the command of this name if exactly one installed plugin has it. Ignore broken plugins."""
    records = [record for plugin in survey(catalog) for record in plugin.records]
    commands = cast("list[Command]", [record for kind, record in records if kind == "commands"])
    matches = [command for command in commands if command.name == normalize(name)]
    if len(matches) > 1:
        raise UsageError(
            f"the command '{name}' is supplied by {' and by '.join(command.supplier for command in matches)}",
            hints=(f"write {' or '.join(f'areal {command.plugin} {command.name}' for command in matches)}",),
        )
    if not matches:
        supplier = SUPPLIERS.get(("commands", normalize(name)))
        missing = catalog.missing([supplier or name])
        known = [*core_commands, *catalog.names(), *(command.name for command in commands)]
        near = [f"did you mean 'areal {match}'?" for match in difflib.get_close_matches(name, known, n=1)]
        raise UsageError(
            f"areal has no command '{name}', and {missing.message}",
            hints=(
                *(near if not supplier else ()),
                *missing.hints[:-1],
                f"commands: {', '.join(core_commands)}",
                *missing.hints[-1:],
            ),
        )
    return matches[0]


def _call(manager: PluginManager, command: Command, arguments: Sequence[str]) -> int:
    """Import a command, run it with the arguments, and return its exit code."""
    target: Any = manager.import_from(command, command.target)
    code = target(list(arguments))
    return code if isinstance(code, int) else 0
