"""Where a config is read from: a file, or a preset that ships inside a plugin."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config.yaml_text import Document, parse_yaml
from areal_core.errors import ConfigError, PluginBrokenError, PluginError, UsageError
from areal_core.plugins.manager import joined, survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.plugins import PluginManager, Preset


@dataclass(frozen=True)
class Source:
    """One document with the name that errors call it by and the folder that its file references are relative to.

    `plugins` are those that a preset needs; the first of them is the one in which it ships.
    """

    document: Document
    name: str
    folder: Path
    stem: str
    text: str
    plugins: tuple[str, ...] = ()

    @property
    def plugin(self) -> str:
        """The plugin in which a preset ships; nothing for a file."""
        return next(iter(self.plugins), "")


def read_file(path: str | Path) -> Source:
    """Read a config file."""
    path = Path(path)
    try:
        if path.is_char_device() or path.is_block_device():
            raise UsageError(f"cannot read the config file {path}: it is a device")
        text = (path.read_bytes() if path.is_file() else _read_once(path)).decode("utf-8")
    except FileNotFoundError:
        here = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [file.name for file in here.iterdir()], n=1)
        hint = f"did you mean {here / near[0]}?" if near else "`areal config init` writes one; a value is key=value"
        raise UsageError(f"there is no config file {path}", hints=(hint,)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the config file {path}: {reason}") from None
    return _source(text, str(path), path.resolve().parent if path.is_file() else Path.cwd(), path.stem)


_read_once = cache(Path.read_bytes)
"""Of a pipe, such as the shell's <(...): a config is read several times."""


def find_preset(manager: PluginManager, reference: str, *, is_config: bool) -> Source:
    """The preset called `reference`; with `is_config` it stood where a file might have stood."""
    try:
        return read_preset(manager, manager.find_preset(reference))
    except PluginError as error:
        if not is_config:
            raise
        raise UsageError(f"there is no config file '{reference}', and {error.message}", hints=error.hints) from None


def default_preset(manager: PluginManager, plugins: Sequence[str], errors: Sequence[PluginError]) -> Source:
    """The default preset of the first plugin of the list that has one; without any, an error with what there is."""
    if not plugins:
        raise UsageError(
            "nothing to run: name a config file, or a plugin that has a preset",
            hints=("areal run CONFIG, or areal run --plugins NAME", _listing(manager)),
        )
    defaults = {preset.plugin: preset for preset in manager.presets() if preset.default}
    for name in plugins:
        if name in defaults:
            return read_preset(manager, defaults[name])
    if not manager.failed.isdisjoint(plugins):  # its preset may have been the one that was meant
        raise joined(errors)
    raise UsageError(
        f"no default preset in {', '.join(plugins)}, and no config file is named",
        hints=("name a config file or a preset: areal run CONFIG", _listing(manager)),
    )


def read_preset(manager: PluginManager, preset: Preset) -> Source:
    """Read the YAML file of a preset out of its package."""
    module_name, _, file_name = preset.path.partition(":")
    try:
        path = Path(str(importlib.import_module(module_name).__file__)).parent / file_name
        text = path.read_text(encoding="utf-8")
    except (ImportError, OSError, UnicodeDecodeError) as error:
        raise PluginBrokenError(
            f"the preset '{preset.reference}' of {preset.supplier} cannot be read at {preset.path}: {error}",
            hints=(f"reinstall it with: pip install --force-reinstall {preset.distribution}",),
        ) from error
    return _source(text, f"preset {preset.reference}", path.parent, preset.name, (preset.plugin, *preset.plugins))


def _source(text: str, name: str, folder: Path, stem: str, plugins: tuple[str, ...] = ()) -> Source:
    document = parse_yaml(text, name)
    document.values = {} if document.values is None else document.values
    if not isinstance(document.values, dict):
        raise ConfigError(f"{name}: a config is a mapping of sections, not a {type(document.values).__name__}")
    if isinstance(base := document.values.get("base_dir"), str):
        folder /= base
    return Source(document, name, folder, stem, text, plugins)


def _listing(manager: PluginManager) -> str:
    """Every preset of every installed plugin."""
    records = [each for plugin in survey(manager.catalog) for each in plugin.records]
    titles = sorted(f"{preset.reference} ({preset.summary})" for kind, preset in records if kind == "presets")
    return f"presets: {', '.join(titles) or 'no installed plugin has one'}"
