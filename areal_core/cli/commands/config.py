"""Show and check a config without running it.

show    print every value, defaults included, and its origin
check   report whether the config is valid (exit code 1 if not)
schema  print the JSON schema, with the components of --plugins
init    print the first default preset of --plugins, or write it to CONFIG;
        if CONFIG is a preset (NAME or PLUGIN/NAME), write it to NAME.yaml in this folder
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_error, print_out
from areal_core.cli.request import Request, add_request_arguments, read_request
from areal_core.errors import ConfigError, PluginError, UsageError

if TYPE_CHECKING:
    import argparse

    from areal_core.config import Resolved

SUMMARY = "show and check a config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal config`."""
    parser.add_argument("action", choices=_ACTIONS, help="what to do with the config; see above")
    add_request_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Run the action that the first argument names, and return the exit code."""
    return _ACTIONS[arguments.action](read_request(arguments))


def _show(request: Request) -> int:
    from areal_core.checks.reading import read_settings
    from areal_core.config.yaml_text import dump, parse_yaml

    resolved = _resolve(request)
    read_settings(resolved)
    lines = dump(resolved.to_tree(), width=1_000_000).splitlines()
    line_numbers, origins = parse_yaml("\n".join(lines), "config").lines, resolved.origins
    for path, line in line_numbers.items():
        origin = origins.get(".".join(str(part) for part in path))
        if origin and lines[line - 1].count('"') % 2 == 0 and lines[line - 1].count("'") % 2 == 0:
            lines[line - 1] = f"{lines[line - 1]:<56}  # {origin}"
    print_out("\n".join(lines))
    return 0


def _check(request: Request) -> int:
    from areal_core.checks.preflight import check_model
    from areal_core.checks.reading import read_settings

    try:
        resolved = _resolve(request)
        notes = read_settings(resolved, checks_models=True)
        check_model(resolved)
    except (ConfigError, PluginError) as error:
        print_error(f"error: {error}")
        return 1
    for note in (*resolved.notes, *notes):
        print_out(f"note: {note}")
    print_out(f"{resolved.name} is valid; plugins: {', '.join(resolved.plugins.names) or 'the core alone'}")
    return 0


def _schema(request: Request) -> int:
    from areal_core.config.schema import json_schema
    from areal_core.plugins import PluginManager

    if request.config or request.overrides:
        raise UsageError("areal config schema describes every config; name plugins with --plugins")
    manager = PluginManager.load(request.plugins)
    print_out(json.dumps(json_schema(manager), indent=2))
    return 0


def _init(request: Request) -> int:
    if request.overrides:
        raise UsageError("areal config init takes no overrides; edit the file, or give them to `areal run`")
    preset = _find_preset_name(request)
    text = _initial_text(request, preset)
    if request.config is None:
        print_out(text.rstrip("\n"))
        return 0
    path = Path(f"{preset.rpartition('/')[2]}.yaml" if preset else request.config)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hints=("name another file",)) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    print_out(f"wrote {path}; run it with: areal run {path}")
    return 0


def _initial_text(request: Request, preset_name: str) -> str:
    """Return the text of a preset with the plugins that it needs. An empty name means the first default preset."""
    from areal_core.config.presets import default_preset, find_preset
    from areal_core.config.resolve import plugin_list
    from areal_core.config.yaml_text import set_value
    from areal_core.plugins import PluginManager

    if not request.plugins and not preset_name:
        raise UsageError(
            "areal config init needs a preset", hints=("name its plugin: --plugins grpo", "or PLUGIN/NAME")
        )
    manager = PluginManager.load(request.plugins)
    if preset_name:
        preset = find_preset(manager, preset_name, is_config=False)
    else:
        preset = default_preset(manager, manager.names, ())
    values = preset.document.values
    of_preset = plugin_list(values["plugins"]) if "plugins" in values else preset.plugins
    plugins = f"[{', '.join(dict.fromkeys([*of_preset, *plugin_list([*request.plugins])]))}]"
    return f"# from {preset.name}\n{set_value(preset.text, 'plugins', plugins)}"


def _find_preset_name(request: Request) -> str:
    """Return the preset that CONFIG names, as PLUGIN/NAME; empty if CONFIG names a file to write.

    A preset is PLUGIN/NAME, or NAME if only one installed plugin has a preset of this name. It has no suffix, and its
    first part is not the name of a folder.
    """
    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.manager import survey

    written = request.config or ""
    plugin, _, name = written.rpartition("/")
    # `os.path.isdir`, because `Path.is_dir` raises if a name is too long.
    if not name or Path(name).suffix or "/" in plugin or os.path.isdir(plugin or name):  # noqa: PTH112
        return ""
    if plugin:
        return written
    records = [record for entry in survey(Catalog.scan()) for kind, record in entry.records if kind == "presets"]
    references = [record.reference for record in records if record.name == name]
    if len(references) > 1:
        raise UsageError(f"{' and '.join(references)} are both presets", hints=("write it with its plugin",))
    if not references:
        near = difflib.get_close_matches(name.lower(), {record.name for record in records}, n=1)
        raise UsageError(
            f"no installed plugin has a preset named '{name:.80}'",
            hints=(*(f"did you mean '{preset}'?" for preset in near), "a file to write has the ending .yaml"),
        )
    return references[0]


def _resolve(request: Request) -> Resolved:
    from areal_core.config import resolve

    return resolve(request.config, request.plugins, request.overrides)


_ACTIONS = {"show": _show, "check": _check, "schema": _schema, "init": _init}
