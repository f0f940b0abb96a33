"""Describe the config as a JSON schema, for editors and other programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema

from areal_core.config.imports import signature_schema
from areal_core.config.run_config import RunConfig
from areal_core.config.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel
    from pydantic_core.core_schema import WithDefaultSchema

    from areal_core.plugins import Component, PluginManager

_LOADING_KEYS = {
    "preset": "Name of a preset whose values this file overrides.",
    "run_dir": "Run folder. Default: runs/<name>-<UTC time>.",
    "base_dir": "Folder that relative paths start from. Relative to the folder of this file, which is the default.",
}
"""Keys that control how areal reads a file. They are not part of the resulting config."""
_TYPES = {
    "integer": "whole number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


class _WithDefaults(GenerateJsonSchema):
    """Adds defaults that come from a factory, which pydantic leaves out."""

    def get_default_value(self, schema: WithDefaultSchema) -> Any:
        made = schema.get("default_factory")
        return super().get_default_value(schema) if made is None else made()  # type: ignore[call-arg]


def json_schema(manager: PluginManager, *, imports: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a config file.

    A key that chooses a component has its kind as `x-areal-kind`. `x-areal-components` has the loaded components of
    each kind.

    Args:
        manager: the loaded plugins.
        imports: whether to import components whose settings are in their signature, which may import torch. If False,
            the schema allows any settings for them.
    """
    schema = _model_schema(RunConfig)
    for key, meaning in _LOADING_KEYS.items():
        schema["properties"][key] = {"type": "string", "description": meaning}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["x-areal-components"] = {
        name: {
            record.reference: component_schema(manager, name, record, imports) for record in manager.components(name)
        }
        for name in manager.kinds
        if name not in {"presets", "commands", "health_checks"}
    }
    return schema


def component_schema(manager: PluginManager, kind: str, record: Component, imports: bool = True) -> dict[str, Any]:
    """Return the summary of a component and the JSON schema of its settings, for a page about a plugin.

    Args:
        manager: the loaded plugins.
        kind: name of the component's kind.
        record: the component.
        imports: whether to import a component whose settings are in its signature, which may import torch. If False,
            the schema allows any settings for it. A settings model is always imported.

    Returns:
        A mapping of `description`, the summary, and `settings`, the schema.

    Raises:
        PluginError: the component or its settings model cannot be imported.

    Example:
        >>> from areal_core.config import component_schema
        >>> from areal_core.plugins import PluginManager
        >>> manager = PluginManager.load([])
        >>> for record in manager.components("launchers"):
        ...     schema = component_schema(manager, "launchers", record)["settings"]
        ...     print(record.reference, sorted(schema["properties"])[:2])
        core/local ['fork_server', 'max_attempts_without_checkpoint']
    """
    if record.config:
        model: Any = manager.import_from(record, record.config)
        is_model = isinstance(model, type) and issubclass(model, Settings)
        settings = _model_schema(model) if is_model else {"type": "object", "additionalProperties": False}
    elif imports or record.is_imported:
        settings = signature_schema(manager.import_from(record, record.target), manager.kinds[kind].supplied)
    else:
        settings = {"type": "object"}
    return {"description": record.summary, "settings": settings}


def describe_values(part: Mapping[str, Any]) -> str:
    """Return in words which values a key of a schema may have, such as `whole number from 1 or null`."""
    null = " or null" if {"type": "null"} in part.get("anyOf", ()) else ""
    if "x-areal-kind" in part:
        return ("list: " if part.get("type") == "array" else "") + str(part["x-areal-noun"]) + null
    if "anyOf" in part:
        return " or ".join(describe_values(option) for option in part["anyOf"])
    if "$ref" in part:
        return "section"
    if written := part.get("enum", [part["const"]] if "const" in part else []):
        return " or ".join(map(str, written))
    if "items" in part:
        return f"list: {describe_values(part['items'])}"
    kind = part.get("type", "anything")
    bounds = [f" {word} {part[bound]}" for bound, word in _BOUNDS.items() if bound in part]
    return _TYPES.get(kind, kind) + "".join(bounds)


def describe_default(part: Mapping[str, Any]) -> str:
    """Return the default of a key as JSON; `its own` for a section, whose keys have their own defaults."""
    if any("$ref" in one for one in (part, *part.get("anyOf", ()))) and isinstance(part.get("default", {}), dict):
        return "its own"
    return json.dumps(part.get("default"))


def _model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a model in which components without a default are required.

    For pydantic they have the default None, because areal itself reports a missing component.
    """
    schema = model.model_json_schema(schema_generator=_WithDefaults)
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            optional = {"type": "null"} in field.get("anyOf", [])
            if "x-areal-kind" in field and field.get("default", "") is None and not optional:
                del field["default"]
                part.setdefault("required", []).append(name)
    return schema
