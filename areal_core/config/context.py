"""What reading a config needs beside its values: it travels as pydantic's validation context."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, ValidationInfo

from areal_core.plugins import PluginManager
from areal_core.plugins.catalog import CORE

if TYPE_CHECKING:
    from areal_core.errors import PluginError


@dataclass(frozen=True)
class ResolutionContext:
    """What the names and paths of a config refer to.

    Attributes:
        manager: the loaded plugins.
        folder: the folder that files are relative to.
        home: the plugin whose settings are being read. Bare names in their defaults mean that plugin's components.
        imports: whether to import the components that are named by import, and to validate their settings. Without,
            these settings stay unread (`areal_core.config.selection`).
        files: filled during the validation: the SHA-256 of every Python file that the config names.
        plugin_errors: filled during the validation: why plugins that the config names cannot be loaded.
    """

    manager: PluginManager = field(default_factory=PluginManager)
    folder: Path = field(default_factory=Path.cwd)
    home: str = CORE
    imports: bool = True
    files: dict[str, str] = field(default_factory=dict)
    plugin_errors: list[PluginError] = field(default_factory=list)

    @classmethod
    def of(cls, info: ValidationInfo) -> ResolutionContext:
        """The context of a validation; for a model that a script makes by hand, the core and the current folder."""
        return info.context if isinstance(info.context, cls) else cls()


def _beside_config(path: Path, info: ValidationInfo) -> Path:
    folder = info.context.folder if isinstance(info.context, ResolutionContext) else Path.cwd()
    return folder.absolute() / os.path.expanduser(path)  # noqa: PTH111  Path's raises for unknown users


LocalPath = Annotated[Path, AfterValidator(_beside_config)]
"""A path in a component's settings: relative to the config that names it, and absolute once it is read."""
