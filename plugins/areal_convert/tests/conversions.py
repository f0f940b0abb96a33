"""Conversions of the configs beside these tests, for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_convert.convert import convert
from areal_convert.source import Source, read

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS = Path(__file__).with_name("configs")


def converted(tree: Mapping[str, Any], rows: int | None = None) -> tuple[dict[str, Any], Source]:
    source = Source(dict(tree), rows)
    return convert(source), source


def at(config: Any, key: str) -> Any:
    """A value by its dotted key; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def changed(**sections: Any) -> tuple[dict[str, Any], Source]:
    """The conversion of grpo.yaml with some keys of some sections, or top-level keys, set otherwise."""
    tree = read(CONFIGS / "grpo.yaml")
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value
    return converted(tree)
