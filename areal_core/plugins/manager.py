"""The plugin manager: loads the plugins that were named, checks what they supply, and finds components by name.

It is the only code that touches pluggy's manager. Plugins are added while a config is read, because a config's own
`type: plugin/name` names plugins; adding one that is already loaded does nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, cast

import pluggy

import areal_core
from areal_core.errors import PluginBrokenError, PluginConflictError, PluginError
from areal_core.plugins import builtin, hooks
from areal_core.plugins.catalog import CORE, CORE_DISTRIBUTION, Catalog, Installed
from areal_core.plugins.events import Events
from areal_core.plugins.loading import load_attribute, load_entry_point, refuse_unmarked
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.provenance import Provenance, describe
from areal_core.plugins.records import (
    KINDS,
    NAME,
    RECORD_TYPES,
    Command,
    Component,
    HealthCheck,
    Preset,
    Record,
    normalise,
)
from areal_core.plugins.suggestions import not_found

if TYPE_CHECKING:
    from collections.abc import Sequence


class PluginManager:
    """The plugins of one process and the components that they supply.

    `blocked` plugins may not be loaded, whoever asks for them. With `core_only` (an empty `AREAL_PLUGINS`) nothing
    beyond the core may. Every process of a run builds its manager from the same list of names.
    """

    def __init__(self, *, catalog: Catalog | None = None, blocked: Sequence[str] = (), core_only: bool = False) -> None:
        self.catalog = Catalog.scan() if catalog is None else catalog
        self.blocked = frozenset(normalise(name) for name in blocked)
        self.core_only = core_only
        self.failed: set[str] = set()
        self._relay = pluggy.PluginManager(PROJECT)
        self._relay.add_hookspecs(hooks)
        self._loaded: dict[str, Installed | None] = {}
        self._records: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        self.events = Events(self._relay)
        self._register(CORE, builtin, None)

    @classmethod
    def load(
        cls, requested: Sequence[str], *, catalog: Catalog | None = None, core_only: bool = False
    ) -> PluginManager:
        """The manager with every plugin in `requested`; a word `no:x` takes x away. All failures are told at once."""
        wanted, blocked = separate(requested)
        manager = cls(catalog=catalog, blocked=blocked, core_only=core_only)
        manager.add(wanted)
        return manager

    @property
    def names(self) -> list[str]:
        """The loaded plugins, in the order of loading, without the core: the list that every process must load."""
        return [name for name in self._loaded if name != CORE]

    def add(self, names: Sequence[str], asked_by: str = "") -> None:
        """Load these plugins as well. Those that can be loaded are, and then one error names all that cannot."""
        errors: list[PluginError] = []
        absent: list[str] = []
        for name in dict.fromkeys(normalise(name) for name in names):
            if name in self._loaded or name in self.failed:
                continue
            try:
                self._refuse(name, asked_by)
                installed = self.catalog.get(name)
                if installed is None:
                    absent.append(name)
                else:
                    installed.check_range()
                    self._register(name, load_entry_point(installed), installed)
                    continue
            except PluginError as error:
                errors.append(error)
            self.failed.add(name)
        if absent:
            errors.insert(0, self.catalog.missing(absent, asked_by))
        if errors:
            raise _joined(errors)

    def components(self, kind: str) -> list[Component]:
        """Everything of one kind that the loaded plugins supply, sorted by reference."""
        return cast("list[Component]", self._sorted(kind))

    def presets(self) -> list[Preset]:
        """The complete configs that the loaded plugins ship."""
        return cast("list[Preset]", self._sorted("presets"))

    def commands(self) -> list[Command]:
        """The commands that the loaded plugins add."""
        return cast("list[Command]", self._sorted("commands"))

    def health_checks(self) -> list[HealthCheck]:
        """The questions about the machine that the loaded plugins bring."""
        return cast("list[HealthCheck]", self._sorted("health_checks"))

    def find(self, kind: str, reference: str) -> Component:
        """The component called `name` or `plugin/name`.

        A plugin prefix, and an installed plugin of the same name as a bare `name`, is loaded on the way.
        """
        return cast("Component", self._find(kind, reference))

    def find_preset(self, reference: str) -> Preset:
        """The preset called `name` or `plugin/name`, found as components are."""
        return cast("Preset", self._find("presets", reference))

    def find_command(self, plugin: str, name: str) -> Command:
        """The command `name` of one plugin."""
        return cast("Command", self._find("commands", f"{plugin}/{name}"))

    def import_from(self, record: Record, location: str) -> object:
        """Import a location that a record names; an error names the record's plugin and how to repair it."""
        title = f"'{record.reference}' of {record.supplier}"
        return load_attribute(location, title, self._loaded.get(record.plugin))

    def hooks(self, name: str) -> list[str]:
        """The hooks that a loaded plugin implements."""
        callers = self._relay.get_hookcallers(self._relay.get_plugin(name)) or []
        return sorted(caller.name for caller in callers)

    def provenance(self) -> list[Provenance]:
        """Which plugins, of which versions and sources, this process runs with; the core is the first."""
        return [describe(name, installed) for name, installed in self._loaded.items()]

    def records(self) -> list[tuple[str, Record]]:
        """Every record of the loaded plugins, with its kind."""
        return [(kind, record) for kind, records in self._records.items() for record in records]

    def _sorted(self, kind: str) -> list[Record]:
        return sorted(self._records[kind], key=lambda record: record.reference)

    def _find(self, kind: str, reference: str) -> Record:
        plugin, _, name = (normalise(part) for part in reference.rpartition("/"))
        if plugin:
            self.add([plugin], asked_by=f" (asked for by '{reference}')")
        elif name in self.catalog.names() and name not in self.blocked and not self.core_only:
            self.add([name])
        for record in self._records[kind]:
            if record.name == name and plugin in ("", record.plugin):
                return record
        raise not_found(kind, reference, loaded=self.records(), failed=self.failed, catalog=self.catalog)

    def _refuse(self, name: str, asked_by: str) -> None:
        if name in self.blocked:
            raise PluginError(
                f"plugin '{name}' is needed{asked_by}, but 'no:{name}' takes it away",
                hints=(f"leave out no:{name}, or what needs the plugin",),
            )
        if self.core_only:
            raise PluginError(
                f"plugin '{name}' is needed{asked_by}, but AREAL_PLUGINS is set and empty: the core alone",
                hints=("unset AREAL_PLUGINS, or name the plugin in it",),
            )

    def _register(self, name: str, plugin: object, installed: Installed | None) -> None:
        """Let pluggy check the hooks, collect the records, and undo everything if something is wrong."""
        title = installed.title if installed else f"plugin '{name}' ({CORE_DISTRIBUTION} {areal_core.__version__})"
        if not NAME.fullmatch(name):
            raise PluginBrokenError(f"{title}: the name is not of the form [a-z][a-z0-9_]*")
        refuse_unmarked(plugin, title)
        try:
            self._relay.register(plugin, name)
            self._check_hooks(plugin, title)
            records = [found for kind in KINDS for found in self._collect(kind, name, title, installed)]
        except (pluggy.PluginValidationError, ValueError, PluginError) as error:
            if self._relay.has_plugin(name):
                self._relay.unregister(name=name)
            if isinstance(error, PluginError):
                raise
            raise PluginBrokenError(f"{title} does not fit the hooks of this core: {error}") from error
        self._loaded[name] = installed
        for kind, record in records:
            self._records[kind].append(record)

    def _check_hooks(self, plugin: object, title: str) -> None:
        """A misspelt hook and a wrapper are errors: pluggy would pass over the first, and the second hides causes."""
        callers = self._relay.get_hookcallers(plugin) or []
        known = [name for name in dir(hooks) if name.startswith(f"{PROJECT}_")]
        try:
            self._relay.check_pending()
        except pluggy.PluginValidationError:
            unknown = [caller.name for caller in callers if not caller.has_spec()]
            near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hints = (f"did you mean {', '.join(near)}?",) if near else ()
            raise PluginBrokenError(
                f"{title} implements {', '.join(unknown)}, which is no hook of areal-core {areal_core.__version__}",
                hints=(*hints, f"hooks: {', '.join(known)}"),
            ) from None
        for caller in callers:
            if any(found.plugin is plugin and (found.wrapper or found.hookwrapper) for found in caller.get_hookimpls()):
                raise PluginBrokenError(f"{title} wraps {caller.name}; hooks of areal cannot be wrapped")

    def _collect(self, kind: str, name: str, title: str, installed: Installed | None) -> list[tuple[str, Record]]:
        """Ask one plugin for its records of one kind, check and stamp them."""
        hook = f"{PROJECT}_{kind}"
        every = getattr(self._relay.hook, hook).get_hookimpls()
        implementations = [found for found in every if found.plugin_name == name]
        if not implementations:
            return []
        try:
            answer = implementations[0].function()
            records = [answer] if isinstance(answer, Record) else list(answer)
        except Exception as error:
            raise PluginBrokenError(f"{title} fails in {hook}: {type(error).__name__}: {error}") from error
        expected = RECORD_TYPES[kind]
        strangers = {type(found).__name__ for found in records if type(found) is not expected}
        faults = [f"returned {', '.join(sorted(strangers))}, not {expected.__name__}"] if strangers else []
        faults = faults or [fault for record in records for fault in record.faults()]
        own = [record.name for record in records] if not faults else []
        faults += [f"supplies '{twice}' twice" for twice in sorted({found for found in own if own.count(found) > 1})]
        if faults:
            raise PluginBrokenError(f"{title}: {hook} is not in order: {'; '.join(faults)}")
        stamp = {
            "plugin": name,
            "distribution": installed.distribution if installed else CORE_DISTRIBUTION,
            "version": installed.version if installed else areal_core.__version__,
        }
        stamped = [dataclasses.replace(found, **stamp) for found in records]
        for record in stamped:
            self._refuse_conflict(kind, record)
        return [(kind, record) for record in stamped]

    def _refuse_conflict(self, kind: str, record: Record) -> None:
        for other in self._records[kind]:
            if other.name == record.name and kind != "commands":
                raise PluginConflictError(
                    f"the {KINDS[kind]} '{record.name}' is supplied by {other.supplier} and by {record.supplier}",
                    hints=(f"leave one of them out, for example with: --plugins no:{record.plugin}",),
                )


def separate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a plugin list into those asked for and those that `no:` takes away; the latter win."""
    blocked = [normalise(word[3:]) for word in words if word.startswith("no:")]
    asked = list(dict.fromkeys(normalise(word) for word in words if not word.startswith("no:")))
    for name in blocked:
        if name == CORE:
            raise PluginError("the core's own components cannot be taken away with 'no:core'")
        near = difflib.get_close_matches(name, asked, n=1)
        if near and name not in asked:
            raise PluginError(f"'no:{name}' takes nothing away", hints=(f"did you mean 'no:{near[0]}'?",))
    return [name for name in asked if name not in blocked and name != CORE], blocked


def _joined(errors: Sequence[PluginError]) -> PluginError:
    """One error for several: the only one itself, or a heading with each below it."""
    if len(errors) == 1:
        return errors[0]
    lines = [line for error in errors for line in (error.message, *(f"  {hint}" for hint in error.hints))]
    return PluginError(f"{len(errors)} problems with plugins", hints=lines, parts=errors)
