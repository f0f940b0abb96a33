"""The trackers' libraries: imported when a run starts, missed in words that name the extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES = {"prometheus": "prometheus_client"}
"""Where the library is not called as the tracker."""


def missing_library(name: str) -> Iterator[str]:
    """What is wrong when a library is not installed, and how to mend it, in one line; nothing when it is installed.

    Args:
        name: of the tracker and of the extra that brings its library.
    """
    library = LIBRARIES.get(name, name)
    if importlib.util.find_spec(library) is None:
        command = install_command("trackers", extra=name)
        yield f"the tracker {name} needs the library {library}, which is not installed: {command}"


def load_library(name: str, module: str | None = None) -> Any:
    """Import a tracker's library, or the `module` through which it is used.

    Raises:
        ConfigError: it is not installed; the message names the extra that brings it.
    """
    for problem in missing_library(name):
        raise ConfigError(problem)
    return importlib.import_module(module or name)
