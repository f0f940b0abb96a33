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
    """The plugins that names refer to and the folder that files are relative to.

    `home` is the plugin whose settings are being read: bare names in their defaults mean that plugin's components.
    `files` (the SHA-256 of every Python file that was loaded) and `plugin_errors` are filled on the way.
    """

    manager: PluginManager = field(default_factory=PluginManager)
    folder: Path = field(default_factory=Path.cwd)
    home: str = CORE
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
