"""Libraries that an extra of this distribution brings: imported where they are used, missed in one kind of words."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator


def missing_library(user: str, module: str, extra: str) -> Iterator[str]:
    """What is wrong when `module` is not installed, and how to mend it, in one line; nothing when it is installed.

    Args:
        user: the component that needs it.
        module: as it is imported.
        extra: of this distribution, which brings it.
    """
    if importlib.util.find_spec(module) is None:
        yield f"{user} needs the library {module}, which is not installed: {install_command('agents', extra=extra)}"


def load_library(user: str, module: str, extra: str) -> Any:
    """Import a library; arguments as in `missing_library`.

    Raises:
        ConfigError: it is not installed; the message names the extra that brings it.
    """
    for problem in missing_library(user, module, extra):
        raise ConfigError(problem)
    return importlib.import_module(module)


def load_gymnasium() -> Any:
    """The library gymnasium; raises as `load_library` does."""
    return load_library("the environment gymnasium", "gymnasium", "gymnasium")
