"""The config as a JSON schema, for editors and other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.config.run_config import RunConfig
from areal_core.config.settings import Settings
from areal_core.plugins.records import KINDS, Component

if TYPE_CHECKING:
    from pydantic import BaseModel

    from areal_core.plugins import PluginManager

_LOADING_KEYS = {
    "preset": "the name of a preset that this file is laid over",
    "run_dir": "the folder of the run; by default runs/<name>-<UTC time>",
    "base_dir": "the folder that paths are relative to; by default that of this file",
}
"""Keys of a file that say how it is read; they are no part of the config that results."""


def json_schema(manager: PluginManager) -> dict[str, Any]:
    """The schema of a config file; a place for a component carries its kind, and each kind its loaded components."""
    schema = _model_schema(RunConfig)
    for key, meaning in _LOADING_KEYS.items():
        schema["properties"][key] = {"type": "string", "description": meaning}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["x-areal-components"] = {
        kind: {record.reference: _component_schema(manager, record) for record in manager.components(kind)}
        for kind in KINDS
        if kind not in {"presets", "commands", "health_checks"}
    }
    return schema


def settings_model(manager: PluginManager, record: Component) -> type[Settings] | None:
    """The model of a component's settings, imported; None if it takes none."""
    model = manager.import_from(record, record.config) if record.config else None
    return model if isinstance(model, type) and issubclass(model, Settings) else None


def _model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a model, with the components that have no default as required: areal itself tells their absence."""
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            optional = {"type": "null"} in field.get("anyOf", [])
            if "x-areal-kind" in field and field.get("default", "") is None and not optional:
                del field["default"]
                part.setdefault("required", []).append(name)
    return schema


def _component_schema(manager: PluginManager, record: Component) -> dict[str, Any]:
    model = settings_model(manager, record)
    settings = _model_schema(model) if model else {"type": "object", "additionalProperties": False}
    return {"description": record.summary, "settings": settings}
