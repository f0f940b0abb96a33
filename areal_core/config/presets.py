"""Read the source of a config: a YAML file, or a preset that a plugin ships."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config.imports import restore_presets
from areal_core.config.yaml_text import Document, parse_yaml
from areal_core.errors import ConfigError, PluginBrokenError, PluginError, UsageError
from areal_core.plugins.manager import joined, survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.plugins import PluginManager, Preset


@dataclass(frozen=True)
class Source:
    """One YAML document and its origin.

    Attributes:
        document: the values with their lines.
        name: name of the document in errors, such as the path of the file.
        folder: folder that references to files are relative to.
        stem: name of the file without its suffix, or name of the preset.
        text: the YAML text.
        plugins: plugins that a preset needs; the first one ships it. Empty for a file.
    """

    document: Document
    name: str
    folder: Path
    stem: str
    text: str
    plugins: tuple[str, ...] = ()

    @property
    def plugin(self) -> str:
        """The plugin that ships a preset; empty for a file."""
        return next(iter(self.plugins), "")


def read_file(path: str | Path) -> Source:
    """Read a config file.

    Raises:
        UsageError: the file does not exist or cannot be read.
        ConfigError: it is not YAML, or not a mapping.
    """
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
"""Reads a pipe, such as the shell's <(...), and keeps its bytes: they can be read once, and areal needs them again."""


def find_preset(manager: PluginManager, reference: str, *, is_config: bool) -> Source:
    """Read the preset called `reference`.

    Args:
        manager: the loaded plugins.
        reference: `name` or `plugin/name`.
        is_config: whether the reference is the argument CONFIG of a command. The error then mentions the file, too.

    Raises:
        PluginError: there is no such preset, or it cannot be read.
        UsageError: there is no such preset, and `is_config` is set.
    """
    try:
        return read_preset(manager, manager.find_preset(reference))
    except PluginError as error:
        if not is_config:
            raise
        raise UsageError(f"there is no config file '{reference}', and {error.message}", hints=error.hints) from None


def default_preset(manager: PluginManager, plugins: Sequence[str], errors: Sequence[PluginError]) -> Source:
    """Read the default preset of the first plugin in a list that has one.

    Args:
        manager: the loaded plugins.
        plugins: names of plugins.
        errors: why some of these plugins could not be loaded.

    Raises:
        UsageError: none of the plugins has a default preset. The hint lists all presets.
        PluginError: one of the plugins could not be loaded, so its preset is unknown.
    """
    if not plugins:
        raise UsageError(
            "nothing to run: name a config file, or a plugin that has a preset",
            hints=("areal run CONFIG, or areal run --plugins NAME", _list_presets(manager)),
        )
    defaults = {preset.plugin: preset for preset in manager.presets() if preset.default}
    for name in plugins:
        if name in defaults:
            return read_preset(manager, defaults[name])
    if not manager.failed.keys().isdisjoint(plugins):  # the plugin that failed may have the default preset
        raise joined(errors)
    raise UsageError(
        f"no default preset in {', '.join(plugins)}, and no config file is named",
        hints=("name a config file or a preset: areal run CONFIG", _list_presets(manager)),
    )


def read_preset(manager: PluginManager, preset: Preset) -> Source:
    """Read the YAML file of a preset from its package.

    Raises:
        PluginBrokenError: it cannot be read, or has a key that is for configs only. A preset has no preset below it,
            and does not choose the folder of a config's relative paths.
    """
    module_name, _, file_name = preset.path.partition(":")
    try:
        path = Path(str(importlib.import_module(module_name).__file__)).parent / file_name
        text = path.read_text(encoding="utf-8")
    except (ImportError, OSError, UnicodeDecodeError) as error:
        raise PluginBrokenError(
            f"the preset '{preset.reference}' of {preset.supplier} cannot be read at {preset.path}: {error}",
            hints=(f"reinstall it with: pip install --force-reinstall {preset.distribution}",),
        ) from error
    source = _source(text, f"preset {preset.reference}", path.parent, preset.name, (preset.plugin, *preset.plugins))
    for key in ("preset", "base_dir"):
        if key in source.document.values:
            raise PluginBrokenError(
                f"the preset '{preset.reference}' of {preset.supplier} has the key '{key}', which is for configs only",
                hints=(f"remove it from {path}",),
            )
    return source


def _source(text: str, name: str, folder: Path, stem: str, plugins: tuple[str, ...] = ()) -> Source:
    document = parse_yaml(text, name)
    document.values = {} if document.values is None else document.values
    if not isinstance(document.values, dict):
        raise ConfigError(f"{name}: a config is a mapping of sections, not a {type(document.values).__name__}")
    restore_presets(document.values, folder)
    return Source(document, name, folder, stem, text, plugins)


def _list_presets(manager: PluginManager) -> str:
    """Return a line with every preset of the installed plugins."""
    records = [record for plugin in survey(manager.catalog) for record in plugin.records]
    titles = sorted(f"{preset.reference} ({preset.summary})" for kind, preset in records if kind == "presets")
    return f"presets: {', '.join(titles) or 'no installed plugin has one'}"
