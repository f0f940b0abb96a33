"""The context of a validation: what the validators of a config need besides its values. Pydantic passes it to them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, ValidationInfo

from areal_core.config.problems import dotted
from areal_core.errors import ConfigError, PluginError
from areal_core.plugins import PluginManager
from areal_core.plugins.catalog import CORE
from areal_core.plugins.manager import joined

if TYPE_CHECKING:
    from areal_core.config.problems import RejectedError


@dataclass(frozen=True)
class ResolutionContext:
    """The plugins and the folder that names and paths in a config refer to, and a record of the files it names.

    Attributes:
        manager: the loaded plugins.
        folder: folder that relative paths begin at.
        home: plugin whose settings are validated. Bare names in their defaults mean components of this plugin.
        imports: whether to import components that have their settings in their signature, and to validate these
            settings. If False, they stay unread (`areal_core.config.selection`).
        files: SHA-256 of each Python file that the config names, by path. The validation fills it.
        plugin_errors: why plugins that the config names cannot be loaded. The validation fills it.
    """

    manager: PluginManager = field(default_factory=PluginManager)
    folder: Path = field(default_factory=Path.cwd)
    home: str = CORE
    imports: bool = True
    files: dict[str, str] = field(default_factory=dict)
    plugin_errors: list[PluginError] = field(default_factory=list)

    @classmethod
    def of(cls, info: ValidationInfo) -> ResolutionContext:
        """Return the context of a validation. The default, for a script's own models, is the core and this folder."""
        return info.context if isinstance(info.context, cls) else cls()

    def error(self, title: str, rejected: RejectedError) -> ConfigError | PluginError:
        """Return the error for the reader of a config, from the problems of a component that `title` names.

        A component without problems was rejected because a plugin cannot be loaded: the result says why.
        """
        if not rejected.problems:
            return joined(self.plugin_errors)
        messages = [f"{dotted(problem.path)}: {problem.message}" for problem in rejected.problems]
        if len(messages) == 1:
            return ConfigError(f"{title}: {messages[0]}", hints=rejected.problems[0].hints, problems=messages)
        hints = [
            line
            for message, problem in zip(messages, rejected.problems, strict=True)
            for line in (message, *(f"  {hint}" for hint in problem.hints))
        ]
        return ConfigError(f"{title}: {len(messages)} problems", hints=hints, problems=messages)


def _beside_config(path: Path, info: ValidationInfo) -> Path:
    folder = info.context.folder if isinstance(info.context, ResolutionContext) else Path.cwd()
    return folder.absolute() / os.path.expanduser(path)  # noqa: PTH111  Path's raises for unknown users


LocalPath = Annotated[Path, AfterValidator(_beside_config)]
"""A path in a component's settings. A config writes it relative to its own folder; the validation makes it absolute."""
