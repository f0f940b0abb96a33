"""From an installed plugin to its hooks and records.

    import_plugin    one distribution ──► Imported     its module, and the kinds and hooks that it adds
    connect          all Imported ──────► pluggy       specifications and guarded implementations, in name order
    read_records     pluggy ────────────► records      checked, each with plugin, distribution and version

`manager.py` does this for each plugin that it adds. An error in any of the three leaves the plugin out.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pluggy

import areal_core
from areal_core.errors import PluginBrokenError, PluginError
from areal_core.plugins import hooks
from areal_core.plugins.catalog import CORE, Installed
from areal_core.plugins.events import EventGuard, Events
from areal_core.plugins.guards import Guard, check_form, guarded
from areal_core.plugins.loading import describe_error, load_entry_point, refuse_unmarked
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.records import KINDS, NAME, Kind, Record
from areal_core.plugins.registered import registered_implementations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ADD_HOOKS: Final = "areal_add_hooks"
ADD_KINDS: Final = "areal_add_kinds"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed plugin, for lists of plugins.

    Attributes:
        installed: the distribution.
        hooks: names of the hooks that it implements.
        events: those of them that neither supply nor add anything.
        records: what it supplies, each with the name of its kind.
        added_kinds: names of the kinds that it adds.
        added_hooks: names of the hooks that it adds.
        cause: why it cannot be loaded; None if it can.
    """

    installed: Installed
    hooks: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    records: tuple[tuple[str, Record], ...] = ()
    added_kinds: tuple[str, ...] = ()
    added_hooks: tuple[str, ...] = ()
    cause: PluginError | None = None


@dataclasses.dataclass(frozen=True)
class Imported:
    """A plugin whose module is imported.

    Attributes:
        installed: the distribution.
        implementations: its functions that are marked as hook implementations, by name, with pluggy's options, and
            one for each kind of its registered components.
        specifications: modules or classes with the specifications of hooks that it adds.
        kinds: that it adds.
    """

    installed: Installed
    implementations: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]]
    specifications: tuple[Any, ...] = ()
    kinds: tuple[Kind, ...] = ()

    @property
    def hooks(self) -> list[str]:
        """Names of the hooks that it implements."""
        return sorted({options["specname"] or name for name, (_, options) in self.implementations.items()})

    @property
    def optional_hooks(self) -> set[str]:
        """Names of the hooks that it implements where they exist, marked with `optionalhook=True`."""
        options = ((options["specname"] or name, options) for name, (_, options) in self.implementations.items())
        return {hook for hook, its_options in options if its_options["optionalhook"]}

    @property
    def added_hooks(self) -> list[str]:
        """Names of the hooks that it adds."""
        return sorted(name for specification in self.specifications for name in _specified(specification))


def import_plugin(installed: Installed) -> Imported:
    """Import the module of a plugin, and read what it adds.

    Raises:
        PluginIncompatibleError: it does not support this core.
        PluginBrokenError: it cannot be imported, or what it adds is invalid.
    """
    title = installed.title
    if installed.name != CORE:
        installed.check_range()
    module = load_entry_point(installed)
    if not NAME.fullmatch(installed.name):
        raise PluginBrokenError(f"{title}: the name is not of the form [a-z][a-z0-9_]*")
    refuse_unmarked(module, title)
    implementations = {**read_implementations(module, title), **registered_implementations(module)}
    if installed.name == CORE:
        return Imported(installed, implementations, (hooks,), tuple(KINDS.values()))
    specifications, kinds = (_added(installed, implementations, hook) for hook in (ADD_HOOKS, ADD_KINDS))
    imported = Imported(installed, implementations, tuple(specifications), tuple(kinds))
    _check_additions(imported)
    return imported


def read_implementations(module: object, title: str) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    """Return the functions of a module or object that are marked with `hookimpl`, by name, with pluggy's options.

    Raises:
        PluginBrokenError: pluggy would call one of them in another way than its author expects.
    """
    reader = pluggy.PluginManager(PROJECT)
    implementations: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}
    for name in dir(module):
        options = reader.parse_hookimpl_opts(module, name)
        if options is not None:
            check_form(getattr(module, name), options, title)
            implementations[name] = getattr(module, name), options
    return implementations


class _Implementations:
    """The object that pluggy registers for a plugin: its functions as attributes.

    Unlike two equal `SimpleNamespace`s, two of these are never equal: pluggy refuses an object that it already has,
    and any number of plugins may have no function at all.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(functions)


def connect(plugins: Iterable[Imported], events: Events) -> pluggy.PluginManager:
    """Return pluggy's manager with the hooks and implementations of some plugins.

    The core registers first, and the others follow in the order of their names.

    Raises:
        PluginBrokenError: an implementation does not fit its hook, or belongs to no hook.
    """
    ordered = sorted(plugins, key=lambda plugin: (plugin.installed.name != CORE, plugin.installed.name))
    kinds = {kind.hook: kind for kind in kinds_of(ordered).values()}
    relay = pluggy.PluginManager(PROJECT)
    for plugin in ordered:
        try:
            for specification in plugin.specifications:
                relay.add_hookspecs(specification)
        except ValueError as error:
            raise PluginBrokenError(f"{plugin.installed.title} adds a hook that cannot be added: {error}") from error
    for plugin in ordered:
        functions = {
            name: guarded(function, options, guard) if guard else function
            for name, (function, options) in plugin.implementations.items()
            for guard in [_guard(plugin.installed, options["specname"] or name, kinds, events)]
        }
        try:
            relay.register(_Implementations(functions), plugin.installed.name)
        except pluggy.PluginValidationError as error:
            title = plugin.installed.title
            raise PluginBrokenError(f"{title} does not fit the hooks of this core: {error}") from error
        _refuse_unknown_hooks(relay, plugin)
    return relay


def read_records(relay: pluggy.PluginManager, kinds: Mapping[str, Kind]) -> list[tuple[str, Record]]:
    """Return everything that the registered plugins supply, with the names of its kinds, in the order of the plugins.

    Raises:
        PluginBrokenError: a plugin fails, or supplies something invalid.
    """
    found = [
        (name, record)
        for name, kind in kinds.items()
        for records in reversed(getattr(relay.hook, kind.hook)())
        for record in records
    ]
    for (kind_name, reference), count in Counter((name, record.reference) for name, record in found).items():
        if count > 1:
            plugin = reference.partition("/")[0]
            raise PluginBrokenError(f"the plugin {plugin} supplies '{reference}' twice in {kinds[kind_name].hook}")
    return found


def kinds_of(plugins: Iterable[Imported]) -> dict[str, Kind]:
    """Return all kinds that some plugins add, by name."""
    return {kind.name: kind for plugin in plugins for kind in plugin.kinds}


def _guard(installed: Installed, hook: str, kinds: Mapping[str, Kind], events: Events) -> Guard | None:
    """Return the guard for a plugin's implementation of a hook; None for a hook that another plugin adds and calls."""
    if hook in kinds:
        return _RecordGuard(installed, kinds[hook])
    return EventGuard(events, installed.name, hook) if hasattr(hooks, hook) else None


class _RecordGuard(Guard):
    """Checks the records of one kind that a plugin supplies, and adds the plugin's name to them."""

    def __init__(self, installed: Installed, kind: Kind) -> None:
        self._installed = installed
        self._kind = kind

    def take(self, answer: Any) -> list[Record]:
        """See `Guard.take`."""
        return self._checked([answer] if isinstance(answer, Record) else list(answer))

    def take_wrapped(self, answer: Any, inner: Any) -> list[list[Record]]:
        """See `Guard.take_wrapped`. Records without a plugin are those that the wrapper has added."""
        answer = [list(records) for records in answer]
        own = [record for records in answer for record in records if not getattr(record, "plugin", "")]
        others = [[record for record in records if record not in own] for records in answer]
        return [self._checked(own), *others]

    def report(self, error: BaseException) -> None:
        """See `Guard.report`."""
        if isinstance(error, PluginBrokenError):
            raise error
        raise PluginBrokenError(
            f"{self._installed.title} fails in {self._kind.hook}: {describe_error(error)}"
        ) from error

    def _checked(self, records: Sequence[Any]) -> list[Record]:
        expected = self._kind.record
        others = {type(record).__name__ for record in records if type(record) is not expected}
        if others:
            faults = [f"returned {', '.join(sorted(others))}, not {expected.__name__}"]
        else:
            names = [record.name for record in records]
            faults = [fault for record in records for fault in record.faults()]
            faults += [f"supplies '{name}' twice" for name in sorted(set(names)) if names.count(name) > 1]
        installed = self._installed
        if faults:
            raise PluginBrokenError(f"{installed.title}: {self._kind.hook} is invalid: {'; '.join(faults)}")
        stamp = {"plugin": installed.name, "distribution": installed.distribution, "version": installed.version}
        return [dataclasses.replace(record, **stamp) for record in records]


def _added(
    installed: Installed, implementations: Mapping[str, tuple[Callable[..., Any], Any]], hook: str
) -> Iterator[Any]:
    """Yield what a plugin returns from `areal_add_hooks` or `areal_add_kinds`: a single thing or several."""
    function, _ = implementations.get(hook, (lambda: (), None))
    try:
        answer = function()
        yield from answer if isinstance(answer, list | tuple) else [answer]
    except (Exception, SystemExit) as error:
        raise PluginBrokenError(f"{installed.title} fails in {hook}: {describe_error(error)}") from error


def _check_additions(imported: Imported) -> None:
    """Raise `PluginBrokenError` for kinds and hooks whose names or forms are wrong."""
    title, name = imported.installed.title, imported.installed.name
    faults = []
    for specification in imported.specifications:
        if not _specified(specification):
            label = getattr(specification, "__name__", repr(specification))
            faults.append(f"{ADD_HOOKS} returned {label}, which has no function marked with @hookspec")
    faults += [
        f"the hook {hook} must begin with {PROJECT}_{name}_, so that it is unique"
        for hook in imported.added_hooks
        if not hook.startswith(f"{PROJECT}_{name}_")
    ]
    for kind in imported.kinds:
        if not isinstance(kind, Kind):
            faults.append(f"{ADD_KINDS} returned {kind!r:.80}, which is no Kind")
        elif not (NAME.fullmatch(kind.name) and kind.name.startswith(f"{name}_")):
            faults.append(f"the kind {kind.name!r} must begin with {name}_, so that it is unique")
        elif kind.hook not in imported.added_hooks:
            faults.append(f"the kind '{kind.name}' needs a specification of {kind.hook}; return it in {ADD_HOOKS}")
    if faults:
        raise PluginBrokenError(f"{title}: {'; '.join(faults)}")


def _specified(specification: Any) -> list[str]:
    """Return the names of the hooks that a module or class specifies."""
    reader = pluggy.PluginManager(PROJECT)
    return [name for name in dir(specification) if reader.parse_hookspec_opts(specification, name) is not None]


def _refuse_unknown_hooks(relay: pluggy.PluginManager, plugin: Imported) -> None:
    """Raise `PluginBrokenError` for a misspelt hook, which pluggy would ignore, with the names that come near."""
    known = sorted(name for name, caller in vars(relay.hook).items() if caller.has_spec())
    unknown = sorted({*plugin.hooks} - {*known} - plugin.optional_hooks)
    if not unknown:
        return
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    raise PluginBrokenError(
        f"{plugin.installed.title} implements {', '.join(unknown)}, which is not a hook of areal-core "
        f"{areal_core.__version__}, nor of a loaded plugin",
        hints=(*([f"did you mean {', '.join(near)}?"] if near else ()), f"hooks: {', '.join(known)}"),
    )
