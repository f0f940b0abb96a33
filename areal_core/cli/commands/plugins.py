"""Show the installed plugins: what each supplies, from which distribution and version, and what is broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_core.cli.output import say

if TYPE_CHECKING:
    import argparse

    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.survey import Report

SUMMARY = "list the installed plugins and what they supply"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal plugins`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show everything about this plugin")
    parser.add_argument("--json", action="store_true", help="write it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """List all plugins, or describe one; 1 if the one that was named is broken."""
    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.records import normalise
    from areal_core.plugins.survey import core_report, survey

    catalog = Catalog.scan()
    name = normalise(arguments.name) if arguments.name else None
    if name and name != "core" and name not in catalog.names():
        raise catalog.missing([name])
    skipped = [] if name is None else [other for other in catalog.names() if other != name]
    reports = [core_report(catalog)] if name in (None, "core") else []
    reports += survey(catalog, skip=skipped)
    if arguments.json:
        say(json.dumps([_as_json(report) for report in reports], indent=2))
    elif name is None:
        for report in reports:
            _list(report)
    else:
        for report in reports:
            _describe(report, catalog)
    return 1 if name and any(report.cause for report in reports) else 0


def _list(report: Report) -> None:
    """One plugin in a few lines."""
    say(f"{report.name}  {report.distribution} {report.version}")
    if report.cause:
        say("  BROKEN: " + str(report.cause).replace("\n", "\n  "))
    kinds: dict[str, list[str]] = {}
    for kind, record in report.records:
        kinds.setdefault(kind, []).append(record.name)
    for kind, names in kinds.items():
        say(f"  {kind}: {', '.join(sorted(names))}")
    events = _events(report)
    if events:
        say(f"  hears: {', '.join(events)}")


def _describe(report: Report, catalog: Catalog) -> None:
    """Everything about one plugin, the settings of its components included."""
    say(f"plugin {report.name}, distribution {report.distribution} {report.version}")
    if report.cause:
        say("BROKEN: " + str(report.cause))
        return
    say(f"hooks: {', '.join(report.hooks) or 'none'}")
    for kind, record in report.records:
        say(f"\n{kind}: {record.reference}\n  {record.summary}")
        for key in ("target", "config", "path"):
            location = getattr(record, key, None)
            if location:
                say(f"  {key}: {location}")
        for line in _settings(report, record, catalog):
            say(f"    {line}")


def _settings(report: Report, record: Any, catalog: Catalog) -> list[str]:
    """The fields of a component's settings, one line each, or why they cannot be shown."""
    from areal_core.config.schema import settings_model
    from areal_core.errors import PluginError
    from areal_core.plugins import PluginManager

    if not getattr(record, "config", None):
        return []
    manager = PluginManager(catalog=catalog)
    manager.add([report.name] if report.name != "core" else [])
    try:
        model = settings_model(manager, record)
    except PluginError as error:
        return str(error).splitlines()
    lines = []
    for name, field in model.model_fields.items() if model else ():
        kind = getattr(field.annotation, "__name__", str(field.annotation)).removeprefix("typing.")
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        lines.append(f"{name}: {kind}, {default}" + (f"  ({field.description})" if field.description else ""))
    return lines


def _as_json(report: Report) -> dict[str, Any]:
    import dataclasses

    return {
        "name": report.name,
        "distribution": report.distribution,
        "version": report.version,
        "hooks": list(report.hooks),
        "components": [{"kind": kind, **dataclasses.asdict(record)} for kind, record in report.records],
        "broken": str(report.cause) if report.cause else None,
    }


def _events(report: Report) -> list[str]:
    from areal_core.plugins.records import KINDS

    registration = {f"areal_{kind}" for kind in KINDS}
    return [hook.removeprefix("areal_") for hook in report.hooks if hook not in registration]
