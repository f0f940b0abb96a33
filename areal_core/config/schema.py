"""The config as a JSON schema, for editors and other programs, and as a file to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import areal_core
from areal_core.config.run_config import RunConfig
from areal_core.config.selection import Selection
from areal_core.config.settings import Settings
from areal_core.config.yaml_text import dump
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

_EXAMPLES: dict[str, Any] = {
    "steps": 100,
    "model": {"path": "path/to/model"},
    "dataset": {"type": "path/to/file.py:rows"},
    "train_engine": {"type": "fsdp"},
    "algorithm": {"type": "grpo"},
}


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


def starter() -> str:
    """A config to begin with: what is required filled in, everything else as a comment with its default."""
    lines = [f"# a run of areal-core {areal_core.__version__}; every commented line shows a default", ""]
    for name, field in RunConfig.model_fields.items():
        lines.append(f"# {field.description}")
        default = field.get_default()
        if name in _EXAMPLES:
            lines += dump({name: _EXAMPLES[name]}).splitlines()
        elif isinstance(default, Settings):
            keys = type(default).model_fields
            shown = [(key, v.reference if isinstance(v, Selection) else v) for key, v in default]
            lines.append(f"# {name}:")
            lines += [f"#   {dump({key: value}).rstrip()}  # {keys[key].description}" for key, value in shown]
        else:
            lines += [f"# {line}" for line in dump({name: default}).splitlines()]
    return "\n".join(lines) + "\n"


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
