"""Import the trackers' libraries when a run starts, with an error that names the extra if one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARIES = {"prometheus": "prometheus_client"}
"""Import names that differ from the name of the tracker."""


def missing_library(name: str) -> Iterator[str]:
    """Yield an error message with the install command if a tracker's library is not installed; else yield nothing.

    Args:
        name: name of the tracker, and of the extra that installs its library.
    """
    library = LIBRARIES.get(name, name)
    if importlib.util.find_spec(library) is None:
        command = install_command("trackers", extra=name)
        yield f"the tracker {name} needs the library {library}, which is not installed: {command}"


def load_library(name: str, module: str | None = None) -> Any:
    """Import a tracker's library, or its submodule `module`.

    Raises:
        ConfigError: it is not installed. The message names the extra to install.
    """
    for problem in missing_library(name):
        raise ConfigError(problem)
    return importlib.import_module(module or name)
