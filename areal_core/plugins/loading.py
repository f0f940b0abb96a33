"""Imports of what a plugin names. Every failure becomes an error that names the plugin and what repairs it."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import TYPE_CHECKING

from areal_core.errors import PluginBrokenError
from areal_core.plugins.markers import PROJECT

if TYPE_CHECKING:
    from areal_core.plugins.catalog import Installed


def load_entry_point(installed: Installed) -> object:
    """Import the module of a plugin, or the object in it that the entry point names.

    Raises:
        PluginBrokenError: the import fails.
    """
    try:
        return installed.entry_point.load()
    except (Exception, SystemExit) as error:
        raise _import_failure(installed.title, installed.entry_point.module, error, installed) from error


def load_attribute(location: str, title: str, installed: Installed) -> object:
    """Import "module:attribute".

    Args:
        location: what to import.
        title: what it is, for errors: a component with its plugin, for example.
        installed: the plugin.

    Raises:
        PluginBrokenError: the import fails, or the module has no such attribute.
    """
    module_name, _, path = location.partition(":")
    try:
        value: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _import_failure(title, module_name, error, installed) from error
    for attribute in path.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            names = [name for name in vars(value) if not name.startswith("_")] if isinstance(value, ModuleType) else []
            raise PluginBrokenError(
                f"{title} names {location}, but {module_name} has no '{path}'",
                hints=(_report(installed), f"{module_name} has: {', '.join(sorted(names)) or 'nothing public'}"),
            ) from None
    return value


def describe_error(error: BaseException) -> str:
    """Return the type of an error and its message, if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def refuse_unmarked(plugin: object, title: str) -> None:
    """Raise `PluginBrokenError` for a function that has a hook's name and no mark: pluggy would ignore it silently."""
    if not isinstance(plugin, ModuleType):
        return
    for name, value in vars(plugin).items():
        is_own = inspect.isfunction(value) and value.__module__ == plugin.__name__
        is_marked = any(hasattr(value, f"{PROJECT}_{mark}") for mark in ("impl", "spec"))
        if is_own and name.startswith(f"{PROJECT}_") and not is_marked:
            raise PluginBrokenError(
                f"{title}: the function '{name}' is named like a hook but is not marked as one",
                hints=("write @hookimpl above it: from areal_core.plugins import hookimpl",),
            )


def _import_failure(title: str, module: str, error: BaseException, installed: Installed) -> PluginBrokenError:
    """Return the error for a failed import.

    If a library is missing, its hint is the command that installs it. Otherwise the mistake is the plugin's, and the
    hint says where to report it.
    """
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and missing.partition(".")[0] != module.partition(".")[0]:
        library = missing.partition(".")[0]
        return PluginBrokenError(
            f"{title} is installed but cannot be imported: module '{missing}' is missing",
            hints=(f"repair it with: {installed.repair(library)}",),
        )
    return PluginBrokenError(
        f"{title} is installed but cannot be imported: importing {module} raises {describe_error(error)}",
        hints=(_report(installed), "--debug shows where it happens"),
    )


def _report(installed: Installed) -> str:
    return f"this is a mistake in the plugin; report it to {installed.report_address()}"
