"""The plugin manager: loads the plugins that were named, and finds what they supply by name.

Plugins are added while a config is read, because `type: plugin/name` in the config names plugins. Adding a plugin that
is loaded already does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from areal_core.errors import PluginError
from areal_core.plugins.catalog import CORE, SUPPLIERS, Catalog, Installed
from areal_core.plugins.events import Events
from areal_core.plugins.loading import load_attribute
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.provenance import Provenance, describe
from areal_core.plugins.records import Command, Component, Kind, Preset, Record, normalize
from areal_core.plugins.registration import (
    ADD_HOOKS,
    ADD_KINDS,
    Imported,
    Plugin,
    connect,
    import_plugin,
    kinds_of,
    read_records,
)
from areal_core.plugins.suggestions import ambiguous, not_found

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pluggy


class PluginManager:
    """The plugins of one process, and the components that they supply.

    Every process of a run builds its manager from the same list of names.

    Args:
        catalog: the installed plugins; read from the metadata on the path if it is left out.

    Attributes:
        catalog: the installed plugins.
        failed: why plugins could not be loaded, by their names.
        events: calls the event hooks.

    Example:
        >>> from areal_core.errors import PluginError
        >>> from areal_core.plugins import PluginManager
        >>> manager = PluginManager()  # has the core's own components; `add` loads plugins
        >>> manager.find("launchers", "core/local").summary
        'runs all processes on this machine'
        >>> try:
        ...     manager.find("launchers", "core/locla")
        ... except PluginError as error:
        ...     print(error.hints[0])
        did you mean 'core/local'?
        >>> manager.kinds["launchers"].hook  # by which a plugin supplies further ones
        'areal_launchers'
    """

    def __init__(self, *, catalog: Catalog | None = None) -> None:
        self.catalog = Catalog.scan() if catalog is None else catalog
        self.failed: dict[str, PluginError] = {}
        self.events = Events()
        self._imported: dict[str, Imported] = {}
        self._records: list[tuple[str, Record]] = []
        self._adding: set[str] = set()
        self._load(Installed.core())

    @classmethod
    def load(cls, requested: Sequence[str]) -> PluginManager:
        """Return a manager with every plugin in `requested`. One `PluginError` reports all failures."""
        manager = cls()
        manager.add(requested)
        return manager

    @property
    def names(self) -> list[str]:
        """The loaded plugins in the order of loading, without the core: the list that every process must load."""
        return [name for name in self._imported if name != CORE]

    @property
    def kinds(self) -> dict[str, Kind]:
        """Every kind of records by name, including those that the loaded plugins add."""
        return kinds_of(self._imported.values())

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's hooks of all loaded plugins, to call those that plugins add: `hook.areal_curriculum_reset(step=3)`.

        The core's own event hooks are called by `events` alone.
        """
        return self.events.relay.hook

    def add(self, names: Sequence[str], asked_by: str = "") -> None:
        """Load further plugins, and load first those whose added hooks they implement.

        Args:
            names: of the plugins.
            asked_by: end of the error's sentence: what asks for them.

        Raises:
            PluginError: names all that cannot be loaded. The others are loaded.
        """
        errors: list[PluginError] = []
        absent: list[str] = []
        for name in dict.fromkeys(normalize(name) for name in names):
            if name in self._imported or name in self._adding:
                continue
            if name in self.failed:
                errors.append(self.failed[name])
                continue
            try:
                installed = self.catalog.get(name)
                if installed is None:
                    absent.append(name)
                else:
                    self._load(installed)
            except PluginError as error:
                errors.append(error)
                self.failed[name] = error
        if absent:
            missing = self.catalog.missing(absent, asked_by)
            errors.insert(0, missing)
            self.failed.update(zip(absent, missing.parts, strict=True))
        if errors:
            raise joined(errors)

    def plugins(self) -> list[Plugin]:
        """Return what each loaded plugin implements, supplies and adds, in the order of loading."""
        others = {ADD_HOOKS, ADD_KINDS, *(kind.hook for kind in self.kinds.values())}
        return [
            Plugin(
                imported.installed,
                tuple(imported.hooks),
                tuple(hook for hook in imported.hooks if hook not in others),
                tuple((kind, record) for kind, record in self._records if record.plugin == name),
                tuple(kind.name for kind in imported.kinds) if name != CORE else (),
                tuple(imported.added_hooks) if name != CORE else (),
            )
            for name, imported in self._imported.items()
        ]

    def components(self, kind: str) -> list[Component]:
        """Return everything of one kind that the loaded plugins supply, sorted by reference."""
        return cast("list[Component]", self._of_kind(kind))

    def presets(self) -> list[Preset]:
        """Return the complete configs that the loaded plugins ship."""
        return cast("list[Preset]", self._of_kind("presets"))

    def find(self, kind: str | Kind, reference: str, home: str = "") -> Component:
        """Return the component called `plugin/name`, or `name` if only one loaded plugin supplies that.

        A prefix loads its plugin. A bare name loads an installed plugin of the same name, or the one that `SUPPLIERS`
        has for it.

        Args:
            kind: of the component: a name in `kinds`, or the kind itself.
            reference: its name.
            home: the plugin whose preset or default settings contain a bare name. There the name means a component of
                this plugin first, then one of the core, then the only one.

        Raises:
            PluginError: no loaded plugin supplies it, several supply a bare name, or the plugin that the reference
                names cannot be loaded.
            ValueError: there is no such kind.
        """
        return cast("Component", self._find(kind, reference, home))

    def find_preset(self, reference: str) -> Preset:
        """Return the preset called `name` or `plugin/name`. Raises as `find`."""
        return cast("Preset", self._find("presets", reference))

    def find_command(self, plugin: str, name: str) -> Command:
        """Return the command `name` of a plugin. Raises `PluginError` if it has no such command."""
        return cast("Command", self._find("commands", f"{plugin}/{name}"))

    def import_from(self, record: Record, location: str) -> object:
        """Import a location that a record names. Raises `PluginError`, which names the plugin and the repair."""
        title = f"'{record.reference}' of {record.supplier}"
        return load_attribute(location, title, self._imported[record.plugin].installed)

    def provenance(self) -> list[Provenance]:
        """Return version and source of each loaded plugin; the core is the first."""
        return [describe(imported.installed) for imported in self._imported.values()]

    def records(self) -> list[tuple[str, Record]]:
        """Return every record of the loaded plugins, with the name of its kind."""
        return [each for plugin in self.plugins() for each in plugin.records]

    def _load(self, installed: Installed) -> None:
        """Import a plugin and register it. Leave everything as it is if that fails."""
        imported = import_plugin(installed)
        self._adding.add(installed.name)
        try:
            self.add(self._owners_of_hooks(imported), f" (plugin '{installed.name}' implements its hooks)")
        finally:
            self._adding.discard(installed.name)
        plugins = {**self._imported, installed.name: imported}
        relay = connect(plugins.values(), self.events)
        records = read_records(relay, kinds_of(plugins.values()))
        self._imported, self._records, self.events.relay = plugins, records, relay

    def _owners_of_hooks(self, imported: Imported) -> list[str]:
        """Return the installed plugins whose names are in the names of the hooks that a plugin implements."""
        known = {hook for other in [*self._imported.values(), imported] for hook in other.added_hooks}
        owners = (
            [name for name in self.catalog.names() if hook.startswith(f"{PROJECT}_{name}_")]
            for hook in imported.hooks
            if hook not in known and hook not in imported.optional_hooks
        )
        return sorted({max(names, key=len) for names in owners if names})

    def _of_kind(self, kind: str) -> list[Record]:
        records = [record for its_kind, record in self._records if its_kind == kind]
        return sorted(records, key=lambda record: record.reference)

    def _find(self, kind: str | Kind, reference: str, home: str = "") -> Record:
        plugin, _, name = (normalize(part) for part in reference.rpartition("/"))
        kind_name = kind.name if isinstance(kind, Kind) else kind
        known = {record.reference: record for record in self._of_kind(kind_name)}
        for owner in (home, CORE) if home and not plugin else ():
            if f"{owner}/{name}" in known:
                return known[f"{owner}/{name}"]
        if plugin:
            self.add([plugin], asked_by=f" (asked for by '{reference}')")
        else:
            names = {name, SUPPLIERS.get((kind_name, name), name)}
            self.add([plugin_name for plugin_name in self.catalog.names() if plugin_name in names])
        matches = [each for each in self._of_kind(kind_name) if each.name == name and plugin in ("", each.plugin)]
        if len(matches) == 1:
            return matches[0]
        kinds = {**self.kinds, **({kind.name: kind} if isinstance(kind, Kind) else {})}
        if kind_name not in kinds:
            raise ValueError(f"no kind of component is called {kind_name!r}; kinds: {', '.join(kinds)}")
        if matches:
            raise ambiguous(kinds[kind_name], matches)
        others = [] if plugin else survey(self.catalog, skip={*self._imported, *self.failed})
        raise not_found(kinds[kind_name], reference, kinds, self._records, others, self.catalog)


def joined(errors: Sequence[PluginError]) -> PluginError:
    """Return one error for several: the only one itself, or a heading with each of them below it.

    An error that stopped several plugins is in it once.
    """
    errors = list(dict.fromkeys(errors))
    if len(errors) == 1:
        return errors[0]
    lines = [line for error in errors for line in (error.message, *(f"  {hint}" for hint in error.hints))]
    parts = [part for error in errors for part in error.parts]
    return PluginError(f"{len(errors)} problems with plugins", hints=lines, parts=parts)


def survey(catalog: Catalog, skip: Collection[str] = ()) -> list[Plugin]:
    """Return the core and every installed plugin, each loaded in its own manager, so that a broken one hides no other.

    Args:
        catalog: the installed plugins.
        skip: names of plugins to leave out.
    """
    plugins = [] if CORE in skip else PluginManager(catalog=catalog).plugins()
    for installed in [entry for entry in catalog.entries if entry.name not in skip]:
        manager = PluginManager(catalog=catalog)
        try:
            manager.add([installed.name])
            plugins.append(next(plugin for plugin in manager.plugins() if plugin.installed.name == installed.name))
        except PluginError as error:
            plugins.append(Plugin(installed, cause=error))
    return plugins
