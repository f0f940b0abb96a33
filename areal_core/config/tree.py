"""Layers of a config, laid over one another: defaults < preset < files < environment < command line.

The tree is made of plain mappings, lists and scalars. Beside it stands, for every key, where its value came from, so
that errors can name file and line and `areal config show` the origin of each value.
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
    """Values and their origins, after the layers that have been laid so far."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def lay(self, source: Source) -> None:
        """Lay a whole file or preset over the tree."""
        lines = source.document.lines

        def origin(path: KeyPath) -> str:
            line = _nearest(lines, path)
            return f"{source.name}:{line}" if line else source.name

        located = locate(source.document.values, source.folder, source.plugin)
        self.values = self._overlay(self.values, located, (), origin)

    def assign(self, override: Override) -> None:
        """Lay one value over the tree; `ValueError` says which part of its path leads nowhere."""
        layer = override.value
        for part in reversed(override.path):
            layer = _Reach({part: layer})
        try:
            self.values = self._overlay(self.values, layer, (), lambda _: override.origin)
        except ValueError as error:
            raise ValueError(f"{override.origin}: {dotted(override.path)}: {error}") from None

    def origin(self, path: KeyPath) -> str:
        """Where the value at a path came from, or the nearest key above it; "" if nobody set it."""
        return _nearest(self.origins, path) or ""

    def _overlay(self, lower: Any, upper: Any, path: KeyPath, origin: Callable[[KeyPath], str]) -> Any:
        """Merge mappings key by key; a section whose `type` changes starts afresh; anything else is replaced."""
        if isinstance(upper, _Reach) and isinstance(lower, list):
            index = _index(lower, next(iter(upper)), path)
            item = self._overlay(lower[index], next(iter(upper.values())), (*path, index), origin)
            return [*lower[:index], item, *lower[index + 1 :]]
        if isinstance(upper, _Reach) and not isinstance(lower, Mapping | str | None):
            raise ValueError(f"{dotted(path)} is a single value, it has no part '{next(iter(upper))}'")
        if isinstance(lower, str) and isinstance(upper, Mapping):
            self.origins[*path, "type"] = self.origins.get(path, "")
            lower = {"type": lower}
        if isinstance(upper, str) and isinstance(lower, Mapping) and same_choice(lower.get("type"), upper):
            upper = {"type": upper}
        if isinstance(lower, Mapping) and isinstance(upper, Mapping):
            changed = "type" in upper and "type" in lower and not same_choice(lower["type"], upper["type"])
            if changed:
                self._forget(path)
            merged = {} if changed else dict(lower)
            if path:
                self.origins.setdefault(path, origin(path))
            for key, value in upper.items():
                merged[key] = self._overlay(merged.get(key), value, (*path, key), origin)
            return merged
        self._forget(path)
        self._note(upper, path, origin)
        return upper

    def _note(self, value: Any, path: KeyPath, origin: Callable[[KeyPath], str]) -> None:
        self.origins[path] = origin(path)
        parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            self._note(part, (*path, key), origin)

    def _forget(self, path: KeyPath) -> None:
        if path not in self.origins:  # so there is nothing below it either
            return
        self.origins = {known: origin for known, origin in self.origins.items() if known[: len(path)] != path}


class _Reach(dict[str, Any]):
    """A mapping of one key that an override's path is made of: unlike others it reaches into lists, by number."""


@dataclass(frozen=True)
class Override:
    """One `section.key=value`, and whether it came from the command line or the environment."""

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def rank(self) -> int:
        """Whole sections before their keys, and the choice of a component before its settings."""
        return len(self.path) - (self.path[-1] == "type")


def parse_override(word: str, origin: str, folder: Path) -> Override:
    """Read `section.key=value`; `ValueError` says what is wrong, without the value."""
    key, separator, text = word.partition("=")
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
    """Give what may name a component its place: a file its folder, a bare name in a preset the preset's plugin."""
    if isinstance(value, str):
        is_name = _FILE_REFERENCE.fullmatch(value) or (plugin and _BARE_NAME.fullmatch(value))
        return Located(value, folder, plugin) if is_name else value
    if isinstance(value, Mapping):
        return {key: locate(part, folder, plugin) for key, part in value.items()}
    return [locate(part, folder, plugin) for part in value] if isinstance(value, list) else value


def leaves(value: Any, path: KeyPath = ()) -> dict[str, Any]:
    """Every single value of a tree by its dotted path; empty lists and sections count as values."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    below = {name: leaf for key, part in parts for name, leaf in leaves(part, (*path, key)).items()}
    return below or {dotted(path): value}


def _nearest(marks: Mapping[KeyPath, Any], path: KeyPath) -> Any:
    """The mark of a path, or of the nearest key above it; None if there is none."""
    return next((marks[path[:end]] for end in range(len(path), -1, -1) if path[:end] in marks), None)


def same_choice(one: Any, other: Any) -> bool:
    """Whether two names choose one component: `grpo/rloo` and `rloo` do, `grpo/rloo` and `mine/rloo` do not."""
    if not isinstance(one, str) or not isinstance(other, str) or ":" in one + other:
        return bool(one == other)
    short, long = sorted((normalize(one), normalize(other)), key=len)
    return short == long or long.endswith(f"/{short}")


def _index(items: list[Any], part: str, path: KeyPath) -> int:
    """The item of a list that one part of an override's path names; `ValueError` if it names none."""
    count = f"{dotted(path)} is a list with {len(items)} item{'' if len(items) == 1 else 's'}"
    if not part.isdigit():
        raise ValueError(f"{count}: name one by its number, from 0")
    if int(part) >= len(items):
        raise ValueError(f"{count}, none with number {part}; they are counted from 0")
    return int(part)
