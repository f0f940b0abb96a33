"""A look at every installed plugin, broken ones included: for `areal plugins`, for commands, for composing errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.errors import PluginError
from areal_core.plugins.catalog import CORE, Catalog, Installed
from areal_core.plugins.registration import Plugin, load_plugin, new_relay

if TYPE_CHECKING:
    from collections.abc import Collection


def survey(catalog: Catalog, skip: Collection[str] = ()) -> list[Plugin]:
    """The core, and each installed plugin by itself, so that one that is broken or in conflict hides no other."""
    plugins = [] if CORE in skip else [load_plugin(Installed.core(), new_relay())]
    for installed in [entry for entry in catalog.entries if entry.name not in skip]:
        try:
            catalog.get(installed.name)  # says so if two distributions claim the name
            plugins.append(load_plugin(installed, new_relay()))
        except PluginError as error:
            plugins.append(Plugin(installed, cause=error))
    return plugins
