"""The plugin manager: loads the plugins that were named, and finds what they supply by name.

Plugins are added while a config is read, because a config's own `type: plugin/name` names plugins; adding one that is
already loaded does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from areal_core.errors import PluginError
from areal_core.plugins.catalog import CORE, SUPPLIERS, Catalog, Installed
from areal_core.plugins.events import Events
from areal_core.plugins.loading import load_attribute
from areal_core.plugins.provenance import Provenance, describe
from areal_core.plugins.records import Command, Component, Preset, Record, normalize
from areal_core.plugins.registration import Plugin, load_plugin, new_relay
from areal_core.plugins.suggestions import ambiguous, not_found

if TYPE_CHECKING:
    from collections.abc import Sequence


class PluginManager:
    """The plugins of one process and the components that they supply.

    Every process of a run builds its manager from the same list of names.
    """

    def __init__(self, *, catalog: Catalog | None = None) -> None:
        self.catalog = Catalog.scan() if catalog is None else catalog
        self.failed: set[str] = set()
        self._relay = new_relay()
        self._plugins: dict[str, Plugin] = {CORE: load_plugin(Installed.core(), self._relay)}
        self.events = Events(self._relay)

    @classmethod
    def load(cls, requested: Sequence[str]) -> PluginManager:
        """The manager with every plugin in `requested`. All failures are told at once."""
        manager = cls()
        manager.add(requested)
        return manager

    @property
    def names(self) -> list[str]:
        """The loaded plugins, in the order of loading, without the core: the list that every process must load."""
        return [name for name in self._plugins if name != CORE]

    def add(self, names: Sequence[str], asked_by: str = "") -> None:
        """Load these plugins as well. Those that can be loaded are; then one `PluginError` names all that cannot."""
        errors: list[PluginError] = []
        absent: list[str] = []
        for name in dict.fromkeys(normalize(name) for name in names):
            if name in self._plugins or name in self.failed:
                continue
            try:
                installed = self.catalog.get(name)
                if installed is not None:
                    self._plugins[name] = load_plugin(installed, self._relay)
                    continue
                absent.append(name)
            except PluginError as error:
                errors.append(error)
            self.failed.add(name)
        if absent:
            errors.insert(0, self.catalog.missing(absent, asked_by))
        if errors:
            raise joined(errors)

    def components(self, kind: str) -> list[Component]:
        """Everything of one kind that the loaded plugins supply, sorted by reference."""
        return cast("list[Component]", self._of_kind(kind))

    def presets(self) -> list[Preset]:
        """The complete configs that the loaded plugins ship."""
        return cast("list[Preset]", self._of_kind("presets"))

    def find(self, kind: str, reference: str, home: str = "") -> Component:
        """The component called `plugin/name`, or by its bare `name` where only one loaded plugin supplies that.

        The plugin of a prefix is loaded on the way. Of a bare name, an installed plugin of the same name is loaded, or
        the one that `SUPPLIERS` has for it. `home` is the plugin in whose preset or default settings a bare name
        stands: there it means that plugin's own component, else the core's, else the only one.

        Raises:
            PluginConflictError: several loaded plugins supply a bare name.
            ComponentNotFoundError: no loaded plugin supplies it.
            PluginError: the plugin that the reference names cannot be loaded.
        """
        return cast("Component", self._find(kind, reference, home))

    def find_preset(self, reference: str) -> Preset:
        """The preset called `name` or `plugin/name`, found as components are, with the same errors."""
        return cast("Preset", self._find("presets", reference))

    def find_command(self, plugin: str, name: str) -> Command:
        """The command `name` of one plugin; `ComponentNotFoundError` if it has none of that name."""
        return cast("Command", self._find("commands", f"{plugin}/{name}"))

    def import_from(self, record: Record, location: str) -> object:
        """Import a location that a record names; `PluginBrokenError` names its plugin and how to repair it."""
        title = f"'{record.reference}' of {record.supplier}"
        return load_attribute(location, title, self._plugins[record.plugin].installed)

    def provenance(self) -> list[Provenance]:
        """Which plugins, of which versions and sources, this process runs with; the core is the first."""
        return [describe(plugin.installed) for plugin in self._plugins.values()]

    def records(self) -> list[tuple[str, Record]]:
        """Every record of the loaded plugins, with its kind."""
        return [each for plugin in self._plugins.values() for each in plugin.records]

    def _of_kind(self, kind: str) -> list[Record]:
        records = [record for its_kind, record in self.records() if its_kind == kind]
        return sorted(records, key=lambda record: record.reference)

    def _find(self, kind: str, reference: str, home: str = "") -> Record:
        plugin, _, name = (normalize(part) for part in reference.rpartition("/"))
        known = {record.reference: record for record in self._of_kind(kind)}
        for owner in (home, CORE) if home and not plugin else ():
            if f"{owner}/{name}" in known:
                return known[f"{owner}/{name}"]
        if plugin:
            self.add([plugin], asked_by=f" (asked for by '{reference}')")
        else:
            names = {name, SUPPLIERS.get((kind, name), name)}
            self.add([plugin_name for plugin_name in self.catalog.names() if plugin_name in names])
        matches = [each for each in self._of_kind(kind) if each.name == name and plugin in ("", each.plugin)]
        if len(matches) > 1:
            raise ambiguous(kind, matches)
        if not matches:
            raise not_found(kind, reference, loaded=self.records(), failed=self.failed, catalog=self.catalog)
        return matches[0]


def joined(errors: Sequence[PluginError]) -> PluginError:
    """One error for several: the only one itself, or a heading with each below it."""
    if len(errors) == 1:
        return errors[0]
    lines = [line for error in errors for line in (error.message, *(f"  {hint}" for hint in error.hints))]
    return PluginError(f"{len(errors)} problems with plugins", hints=lines, parts=errors)
