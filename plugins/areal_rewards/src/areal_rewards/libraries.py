"""Import optional libraries when they are used, with one kind of error if they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator


def missing_library(user: str, module: str, extra: str) -> Iterator[str]:
    """Yield an error message with the install command if `module` is not installed; yield nothing if it is.

    Args:
        user: component that needs the library.
        module: import name of the library.
        extra: extra of this distribution that installs it.
    """
    if importlib.util.find_spec(module) is None:
        yield f"{user} needs the library {module}, which is not installed: {install_command('rewards', extra=extra)}"


def load_library(user: str, module: str, extra: str) -> Any:
    """Import a library. The arguments are those of `missing_library`.

    Raises:
        ConfigError: it is not installed. The message names the extra to install.
    """
    for problem in missing_library(user, module, extra):
        raise ConfigError(problem)
    return importlib.import_module(module)
