"""`config.md` and `components.md`: every key of a config, and the settings of every component, from their models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from docstrings import protocol_of

from areal_core.cli.commands.run import SAFE_ON_RESUME
from areal_core.config.schema import describe_default, describe_values, json_schema
from areal_core.plugins import PluginManager
from areal_core.plugins.records import KINDS, with_article
from areal_core.sdk import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INTRODUCTION: Final = """# Config

One YAML file describes a run. Where you choose a component, write its name, or a mapping with `type:` and its
settings: `train_engine: {type: fsdp, learning_rate: 3e-4}`. `type` is one of

| form | means |
|---|---|
| `plugin/name` | a plugin's component; the plugin is loaded |
| `name` | the component of this name, if only one loaded plugin has it |
| `package.module:attribute` | a function or class, by import |
| `path/to/file.py:attribute` | a function or class in a file, relative to the config |

**Layers**: defaults < preset < file < environment (`AREAL_SET="seed=3 steps=5"`) < command line. Values on the command
line are YAML: `3e-4` is a number, `off` is text, `key=null` clears, `rewards.0.weight=2` reaches into a list. A
section that names another `type` starts from that component's defaults; the same one, or none, keeps what is set. A
list replaces a list.

**Secrets** are written `env:NAME`; only that reference is stored.

`areal config show` prints every value with its origin; `areal config check` reports all mistakes at once, with file and
line. [Settings of components](components.md) lists those beside each `type:`."""
COMPONENTS: Final = """# Settings of components

Every component that comes with areal and has settings, except [algorithms and their parts](algorithms.md).
`areal plugins NAME` prints the same for the plugins that you have installed."""


def config_page() -> str:
    """Every key of a config."""
    schema = json_schema(PluginManager.load(()))
    safe = ", ".join(f"`{key}`" for key in SAFE_ON_RESUME)
    changed = f"`areal run --resume RUN_DIR section.key=value` may change these, with all that is below them: {safe}."
    tables = _tables("", schema, schema["$defs"])
    return "\n\n".join((INTRODUCTION, "## Every key", *tables, "## What a resume may change", changed))


def components_page(plugins: Iterable[str]) -> str:
    """The settings of every component of the core and of these plugins."""
    parts, manager = [COMPONENTS], PluginManager.load(plugins)
    for kind, components in json_schema(manager, imports=True)["x-areal-components"].items():
        found = {name: one for name, one in components.items() if one["settings"].get("properties")}
        if not found or (kind in KINDS and protocol_of(kind).__module__ == Algorithm.__module__):
            continue
        parts.append(f"## {kind.replace('_', ' ').capitalize()}")
        for name, described in found.items():
            settings = described["settings"]
            noun = with_article(manager.kinds[kind].noun).capitalize()
            parts.append(f"### `{name}`\n\n{noun}: {described['description']}.")
            if kind not in KINDS:  # no Protocol of the core says what such a component computes
                parts.append(settings["description"])
            parts += _tables(name, settings | {"description": ""}, settings.get("$defs", {}))
    return "\n\n".join(parts)


def _tables(path: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """The keys of a model, then those of the models inside it, each under the path that leads to it."""
    if path and schema["description"]:
        yield f"### `{path}`\n\n{schema['description']}"
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, part in schema["properties"].items():
        default = "required" if key in schema.get("required", ()) else describe_default(part)
        default = default if default in ("required", "its own") else f"`{default}`"
        meaning = " ".join(part.get("description", "").split())
        rows.append(f"| `{key}` | {describe_values(part)} | {default} | {meaning} |")
    yield "\n".join(rows)
    for key, part in schema["properties"].items():
        inner = part.get("x-areal-common") or definitions.get(_model(part))
        if inner:
            yield from _tables(f"{path}.{key}".lstrip("."), inner, definitions)


def settings_table(settings: dict[str, Any]) -> str:
    """The settings of one component, from its schema."""
    return "\n\n".join(_tables("", settings | {"description": ""}, settings.get("$defs", {})))


def _model(part: dict[str, Any]) -> str:
    """The name of the model that a key holds, be it optional; nothing if it holds none."""
    references = (option["$ref"] for option in (part, *part.get("anyOf", ())) if "$ref" in option)
    return next(references, "").rpartition("/")[2]
