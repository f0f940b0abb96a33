"""Show the installed plugins: their components, distributions and versions, and what is broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_core.cli.output import print_out

if TYPE_CHECKING:
    import argparse

    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.registration import Plugin

SUMMARY = "list the installed plugins and their components"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal plugins`."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="show everything about this plugin (default: list all plugins)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """List all plugins, or describe the one that is named. Return 1 if the named plugin is broken, else 0."""
    from areal_core.plugins.catalog import CORE, Catalog
    from areal_core.plugins.manager import survey
    from areal_core.plugins.records import normalize

    catalog = Catalog.scan()
    name = normalize(arguments.name) if arguments.name else None
    known = {CORE, *catalog.names()}
    if name and name not in known:
        raise catalog.missing([name])
    plugins = survey(catalog, skip=known - {name} if name else ())
    if arguments.json:
        print_out(json.dumps([_as_json(plugin) for plugin in plugins], indent=2))
    elif name is None:
        for plugin in plugins:
            _print_summary(plugin)
    else:
        for plugin in plugins:
            _print_details(plugin, catalog)
    return 1 if name and any(plugin.cause for plugin in plugins) else 0


def _print_summary(plugin: Plugin) -> None:
    """Print a plugin and the names of its components in a few lines."""
    print_out(f"{plugin.installed.name}  {plugin.installed.distribution} {plugin.installed.version}")
    if plugin.cause:
        print_out("  BROKEN: " + str(plugin.cause).replace("\n", "\n  "))
    kinds: dict[str, list[str]] = {}
    for kind, record in plugin.records:
        kinds.setdefault(kind, []).append(record.name)
    for kind, names in kinds.items():
        print_out(f"  {kind}: {', '.join(sorted(names))}")
    if plugin.added_kinds:
        print_out(f"  adds kinds:  {', '.join(plugin.added_kinds)}")
    if plugin.added_hooks:
        print_out(f"  adds hooks:  {', '.join(plugin.added_hooks)}")
    if plugin.events:
        print_out(f"  event hooks:  {', '.join(event.removeprefix('areal_') for event in plugin.events)}")


def _print_details(plugin: Plugin, catalog: Catalog) -> None:
    """Print everything about a plugin, the settings of its components included."""
    print_out(
        f"plugin {plugin.installed.name}, distribution {plugin.installed.distribution} {plugin.installed.version}"
    )
    if plugin.cause:
        print_out("BROKEN: " + str(plugin.cause))
        return
    print_out(f"hooks: {', '.join(plugin.hooks) or 'none'}")
    for label, names in (("adds kinds", plugin.added_kinds), ("adds hooks", plugin.added_hooks)):
        if names:
            print_out(f"{label}: {', '.join(names)}")
    for kind, record in plugin.records:
        print_out(f"\n{kind}: {record.reference}\n  {record.summary}")
        for key in record.LOCATIONS:
            location = getattr(record, key)
            if location:
                print_out(f"  {key}: {location}")
        for line in _describe_settings(plugin, kind, record, catalog):
            print_out(f"    {line}")


def _describe_settings(plugin: Plugin, kind: str, record: Any, catalog: Catalog) -> list[str]:
    """Return a line for each field of a component's settings, or the error why they cannot be read."""
    from pydantic import PydanticUserError

    from areal_core.config.schema import component_schema, describe_default, describe_values
    from areal_core.errors import PluginError
    from areal_core.plugins import Component, PluginManager

    if not isinstance(record, Component):
        return []
    manager = PluginManager(catalog=catalog)
    manager.add([plugin.installed.name])
    try:
        settings = component_schema(manager, kind, record)["settings"]
    except (PluginError, PydanticUserError) as error:
        return str(error).splitlines()
    lines = []
    for name, part in settings.get("properties", {}).items():
        default = "required" if name in settings.get("required", ()) else f"default {describe_default(part)}"
        meaning = f"  ({' '.join(part['description'].split())})" if "description" in part else ""
        lines.append(f"{name}: {describe_values(part)}, {default}{meaning}")
    return lines


def _as_json(plugin: Plugin) -> dict[str, Any]:
    import dataclasses

    return {
        "name": plugin.installed.name,
        "distribution": plugin.installed.distribution,
        "version": plugin.installed.version,
        "hooks": list(plugin.hooks),
        "added_kinds": list(plugin.added_kinds),
        "added_hooks": list(plugin.added_hooks),
        "components": [{"kind": kind, **dataclasses.asdict(record)} for kind, record in plugin.records],
        "broken": str(plugin.cause) if plugin.cause else None,
    }
