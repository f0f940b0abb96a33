"""Merge the layers of a config: defaults < preset < files < environment < command line.

A tree consists of plain mappings, lists and scalars. It records the origin of every value: errors name the file and
the line, and `areal config show` prints the origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from areal_core.config.imports import Located
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import dotted
from areal_core.config.yaml_text import parse_value
from areal_core.plugins.records import normalize

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config.presets import Source

_FILE_REFERENCE: Final = re.compile(r"[^\s:]+\.py:[A-Za-z_]\w*")
_BARE_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")
_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_-]+)*")


@dataclass
class Tree:
    """The merged values of the layers so far, and the origin of each value by its path."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def merge(self, source: Source) -> None:
        """Merge a whole file or preset into the tree. Its values replace those of lower layers."""
        lines = source.document.lines

        def origin(path: KeyPath) -> str:
            line = _nearest(lines, path)
            return f"{source.name}:{line}" if line else source.name

        located = locate(source.document.values, source.folder, source.plugin)
        self.values = self._merge(self.values, located, (), origin)

    def assign(self, override: Override) -> None:
        """Set the value of an override. Raise `ValueError` if a part of its path does not exist."""
        layer = override.value
        for part in reversed(override.path):
            layer = _PathStep({part: layer})
        try:
            self.values = self._merge(self.values, layer, (), lambda _: override.origin)
        except ValueError as error:
            raise ValueError(f"{override.origin}: {dotted(override.path)}: {error}") from None

    def origin(self, path: KeyPath) -> str:
        """Return the origin of the value at a path, or of the nearest key above it; empty if no layer sets one."""
        return _nearest(self.origins, path) or ""

    def _merge(self, lower: Any, upper: Any, path: KeyPath, origin: Callable[[KeyPath], str]) -> Any:
        """Merge mappings key by key and replace any other value. A section whose `type` changes starts empty."""
        if isinstance(upper, _PathStep) and isinstance(lower, list):
            index = _list_index(lower, next(iter(upper)), path)
            item = self._merge(lower[index], next(iter(upper.values())), (*path, index), origin)
            return [*lower[:index], item, *lower[index + 1 :]]
        if isinstance(upper, _PathStep) and not isinstance(lower, Mapping | str | None):
            raise ValueError(f"{dotted(path)} is a single value, it has no part '{next(iter(upper))}'")
        if isinstance(lower, str) and isinstance(upper, Mapping):
            self.origins[*path, "type"] = self.origins.get(path, "")
            lower = {"type": lower}
        if isinstance(upper, str) and isinstance(lower, Mapping) and same_choice(lower.get("type"), upper):
            upper = {"type": upper}
        if isinstance(lower, Mapping) and isinstance(upper, Mapping):
            changed = "type" in upper and "type" in lower and not same_choice(lower["type"], upper["type"])
            if changed:
                self._remove_origins(path)
            merged = {} if changed else dict(lower)
            if path:
                self.origins.setdefault(path, origin(path))
            for key, value in upper.items():
                merged[key] = self._merge(merged.get(key), value, (*path, key), origin)
            return merged
        self._remove_origins(path)
        self._add_origins(upper, path, origin)
        return upper

    def _add_origins(self, value: Any, path: KeyPath, origin: Callable[[KeyPath], str]) -> None:
        self.origins[path] = origin(path)
        parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            self._add_origins(part, (*path, key), origin)

    def _remove_origins(self, path: KeyPath) -> None:
        if path not in self.origins:  # then no path below it has an origin either
            return
        self.origins = {known: origin for known, origin in self.origins.items() if known[: len(path)] != path}


class _PathStep(dict[str, Any]):
    """One part of an override's path, as a mapping with this key. Only this mapping can address items of lists."""


@dataclass(frozen=True)
class Override:
    """One `section.key=value`.

    Attributes:
        path: the parts of the key.
        value: the value that is parsed from YAML.
        origin: `command line` or `AREAL_SET`.
    """

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def rank(self) -> int:
        """Sort key: a whole section comes before its keys, and the choice of a component before its settings."""
        return len(self.path) - (self.path[-1] == "type")


def parse_override(assignment: str, origin: str, folder: Path) -> Override:
    """Parse `section.key=value`.

    Args:
        assignment: the text.
        origin: `command line` or `AREAL_SET`.
        folder: folder that a file in the value is relative to.

    Raises:
        ValueError: the text has another form, or its value is not YAML.
    """
    key, separator, text = assignment.partition("=")
    if not separator:
        raise ValueError(f"{origin}: '{key}' is not of the form section.key=value")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{origin}: '{key}' is not a key; write section.key=value")
    try:
        value = locate(parse_value(text), folder)
    except ValueError as error:
        raise ValueError(f"{origin}: the value of {key} {error}") from None
    return Override(tuple(key.split(".")), value, origin)


def locate(value: Any, folder: Path, plugin: str = "") -> Any:
    """Return a value in which each text that may name a component has its origin (`Located`).

    Args:
        value: a tree of plain values.
        folder: folder that the path of a file is relative to.
        plugin: plugin whose preset contains the value, for bare names; empty for any other source.
    """
    if isinstance(value, Located):
        return value
    if isinstance(value, str):
        is_name = _FILE_REFERENCE.fullmatch(value) or (plugin and _BARE_NAME.fullmatch(value))
        return Located(value, folder, plugin) if is_name else value
    if isinstance(value, Mapping):
        return {key: locate(part, folder, plugin) for key, part in value.items()}
    return [locate(part, folder, plugin) for part in value] if isinstance(value, list) else value


def preset_names(value: Any, path: KeyPath) -> dict[str, str]:
    """Return the plugin of each bare name in a tree that comes from a preset of a plugin, by its dotted path."""
    texts = {name: leaf for name, leaf in leaves(value, path).items() if isinstance(leaf, Located)}
    return {name: text.plugin for name, text in texts.items() if text.plugin and _BARE_NAME.fullmatch(text)}


def leaves(value: Any, path: KeyPath = ()) -> dict[str, Any]:
    """Return every single value of a tree by its dotted path. An empty list or section counts as a value."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    below = {name: leaf for key, part in parts for name, leaf in leaves(part, (*path, key)).items()}
    return below or {dotted(path): value}


def _nearest(marks: Mapping[KeyPath, Any], path: KeyPath) -> Any:
    """Return the mark of a path, or of the nearest key above it; None if there is none."""
    return next((marks[path[:end]] for end in range(len(path), -1, -1) if path[:end] in marks), None)


def same_choice(first: Any, second: Any) -> bool:
    """Return whether two names choose the same component, as `grpo/rloo` and `rloo` do. `mine/rloo` is another one."""
    if not isinstance(first, str) or not isinstance(second, str) or ":" in first + second:
        return bool(first == second)
    short, long = sorted((normalize(first), normalize(second)), key=len)
    return short == long or long.endswith(f"/{short}")


def _list_index(items: list[Any], part: str, path: KeyPath) -> int:
    """Return the index of the item that one part of an override's path names. Raise `ValueError` if there is none."""
    count = f"{dotted(path)} is a list with {len(items)} item{'' if len(items) == 1 else 's'}"
    if not part.isdigit():
        raise ValueError(f"{count}: name one by its number, from 0")
    if int(part) >= len(items):
        raise ValueError(f"{count}, none with number {part}; they are counted from 0")
    return int(part)
