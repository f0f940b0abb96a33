"""Writes `docs/config.md`: a hand-written introduction around tables that are made from the models.

python docs/config_page.py [PLUGIN ...]      with the settings of these plugins' components, to standard output
python docs/config_page.py > docs/config.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.config.schema import json_schema
from areal_core.plugins import PluginManager
from areal_core.plugins.records import KINDS, with_article

if TYPE_CHECKING:
    from collections.abc import Iterator

_TABLES: Final = "<!-- every key -->\n"
_TYPES: Final = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "mapping"}
_BOUNDS: Final = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


def reference(manager: PluginManager) -> str:
    """The page, with the settings of every component that the loaded plugins supply; the core's are always there."""
    schema = json_schema(manager)
    parts = ["## Every key", *_tables("", schema, schema["$defs"]), "## Settings of components"]
    for kind, components in schema["x-areal-components"].items():
        for name, described in components.items():
            settings = described["settings"]
            if settings.get("properties"):
                parts.append(f"### `{name}`\n\n{with_article(KINDS[kind]).capitalize()}: {described['description']}.")
                parts += _tables(name, settings | {"description": ""}, settings.get("$defs", {}))
    template = Path(__file__).with_name("config_introduction.md").read_text(encoding="utf-8")
    return template.replace(_TABLES, "\n\n".join(parts) + "\n")


def _tables(path: str, schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """The keys of a model, then those of the models inside it, each under the path that leads to it."""
    if path and schema["description"]:
        yield f"### `{path}`\n\n{schema['description']}"
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, part in schema["properties"].items():
        default = "required" if key in schema.get("required", ()) else _default(part)
        rows.append(f"| `{key}` | {_values(part)} | {default} | {part.get('description', '')} |")
    yield "\n".join(rows)
    for key, part in schema["properties"].items():
        inner = part.get("x-areal-common") or definitions.get(_model(part))
        if inner:
            yield from _tables(f"{path}.{key}".lstrip("."), inner, definitions)


def settings_table(settings: dict[str, Any]) -> str:
    """The settings of one component, from its schema."""
    return "\n\n".join(_tables("", settings | {"description": ""}, settings.get("$defs", {})))


def _default(part: dict[str, Any]) -> str:
    return "its own" if _model(part) and part.get("default") else f"`{json.dumps(part.get('default'))}`"


def _model(part: dict[str, Any]) -> str:
    """The name of the model that a key holds, be it optional; nothing if it holds none."""
    references = (option["$ref"] for option in (part, *part.get("anyOf", ())) if "$ref" in option)
    return next(references, "").rpartition("/")[2]


def _values(part: dict[str, Any]) -> str:
    """What may be written for a key, in words."""
    null = " or null" if {"type": "null"} in part.get("anyOf", ()) else ""
    if "x-areal-kind" in part:
        return ("list: " if part.get("type") == "array" else "") + KINDS[part["x-areal-kind"]] + null
    if "anyOf" in part:
        return " or ".join(_values(option) for option in part["anyOf"])
    if "$ref" in part:
        return "section, below"
    if "enum" in part:
        return " or ".join(map(str, part["enum"]))
    if "items" in part:
        return f"list: {_values(part['items'])}"
    kind = part.get("type", "anything")
    bounds = [f" {word} {part[bound]}" for bound, word in _BOUNDS.items() if bound in part]
    return _TYPES.get(kind, kind) + "".join(bounds)


if __name__ == "__main__":
    sys.stdout.write(reference(PluginManager.load(sys.argv[1:])))
