"""Convert arguments that a model writes as bare text to the types of the tool's JSON schema.

A text is converted only if the schema does not allow a string: for an optional string, `12345` stays the string that
the model wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from areal_core.chat import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANY: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_DEEPEST: Final = 8
"""Depth to which nested schemas are followed; anything is allowed below. References may form cycles."""
_CONSTANTS: Final = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
"""Constants in the spelling of JSON and of Python; chat templates write both."""
_TYPES: Final[Mapping[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


def typed_arguments(name: str, texts: Mapping[str, Any], tools: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call, with texts converted to the types of the tool's schema.

    Args:
        name: name of the function.
        texts: arguments by name, as the model wrote them.
        tools: tools that the agent offers.
    """
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    schema = next((f.get("parameters") or {} for f in functions if f.get("name") == name), {})
    properties = schema.get("properties") or {}
    return {
        key: _value(text, properties.get(key, True), schema) if isinstance(text, str) else text
        for key, text in texts.items()
    }


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a text as a value that the schema allows, or unchanged if strings are allowed or no value fits."""
    allowed = _allowed(schema, root)
    bare = text.strip()
    if isinstance(allowed, list):
        return text if text in allowed else next((value for value in allowed if _spells(bare, value)), text)
    if "string" in allowed:
        return text
    value = _CONSTANTS[bare] if bare in _CONSTANTS else _parsed(bare)
    return value if _TYPES[type(value)] in allowed else text


def _parsed(text: str) -> Any:
    """Return the JSON value of a text, or the text if it is not JSON."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _spells(text: str, value: Any) -> bool:
    """Return whether a text spells a value that is not a string."""
    spelled = _CONSTANTS[text] if text in _CONSTANTS else _parsed(text)
    return type(spelled) is type(value) and not isinstance(value, str) and bool(spelled == value)


def _allowed(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | list[Any]:
    """Return the JSON types that a schema allows, or its values if it lists them. "number" includes integers."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ANY
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    if "$ref" in schema:
        return _allowed(_referenced(schema["$ref"], root), root, depth + 1)
    types = _ANY
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            choices = [_types(_allowed(choice, root, depth + 1)) for choice in schema[keyword]]
            types &= frozenset().union(*choices)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        part_types = _allowed(part, root, depth + 1)
        if isinstance(part_types, list):
            return part_types
        types &= part_types
    named = schema.get("type")
    named_types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if not named_types:  # a schema with `properties` or `items` usually means an object or an array
        named_types |= {"object" for key in ("properties", "additionalProperties") if key in schema}
        named_types |= {"array" for key in ("items", "prefixItems") if key in schema}
    if named_types:
        types &= named_types | ({"number"} if "integer" in named_types else set())
        types |= {"null"} if schema.get("nullable") is True else set()
    return types


def _types(allowed: frozenset[str] | list[Any]) -> frozenset[str]:
    if isinstance(allowed, list):
        return frozenset(_TYPES.get(type(value), "string") for value in allowed)
    return allowed


def _referenced(reference: Any, root: Any) -> Any:
    """Return the schema that `#/$defs/NAME` refers to, or True (anything is allowed) if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    for step in reference[1:].split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~"), True) if isinstance(root, Mapping) else True
    return root
