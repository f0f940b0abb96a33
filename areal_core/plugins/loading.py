"""Importing what a plugin names, guarded: every failure becomes an error that names the plugin and the cure."""

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
    """Import the record module of a plugin (or the object in it that the entry point names)."""
    try:
        return installed.entry_point.load()
    except (Exception, SystemExit) as error:
        raise _import_failure(installed.title, installed.entry_point.module, error, installed) from error


def load_attribute(location: str, title: str, installed: Installed) -> object:
    """Import "module:attribute" for the one that `title` names, for example a component with its plugin."""
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
    """The kind of an error and its message, where it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def refuse_unmarked(plugin: object, title: str) -> None:
    """Raise for functions that are named like hooks and lack the mark: pluggy would pass over them in silence."""
    if not isinstance(plugin, ModuleType):
        return
    for name, value in vars(plugin).items():
        is_own = inspect.isfunction(value) and value.__module__ == plugin.__name__
        if is_own and name.startswith(f"{PROJECT}_") and not hasattr(value, f"{PROJECT}_impl"):
            raise PluginBrokenError(
                f"{title}: the function '{name}' is named like a hook but is not marked as one",
                hints=("write @hookimpl above it: from areal_core.plugins import hookimpl",),
            )


def _import_failure(title: str, module: str, error: BaseException, installed: Installed) -> PluginBrokenError:
    """Tell a missing library, which the user can install, from a mistake in the plugin, which its authors mend."""
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
