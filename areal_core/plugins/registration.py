"""Loading one plugin: import its records, let pluggy check its hooks, check every record and stamp it."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING

import pluggy

import areal_core
from areal_core.errors import PluginBrokenError, PluginError
from areal_core.plugins import hooks
from areal_core.plugins.catalog import CORE, Installed
from areal_core.plugins.loading import describe_error, load_entry_point, refuse_unmarked
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.records import KINDS, NAME, RECORD_TYPES, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One plugin: the hooks that it implements and what it supplies, by kind; or why it cannot be loaded (`cause`)."""

    installed: Installed
    hooks: tuple[str, ...] = ()
    records: tuple[tuple[str, Record], ...] = ()
    cause: PluginError | None = None


def new_relay() -> pluggy.PluginManager:
    """pluggy's manager with the hooks of areal and no plugin yet."""
    relay = pluggy.PluginManager(PROJECT)
    relay.add_hookspecs(hooks)
    return relay


def load_plugin(installed: Installed, relay: pluggy.PluginManager) -> Plugin:
    """Import a plugin and register it with `relay`; if anything is wrong, `PluginError` says so and nothing is left."""
    if installed.name != CORE:
        installed.check_range()
    title, name, module = installed.title, installed.name, load_entry_point(installed)
    if not NAME.fullmatch(name):
        raise PluginBrokenError(f"{title}: the name is not of the form [a-z][a-z0-9_]*")
    refuse_unmarked(module, title)
    try:
        relay.register(module, name)
        _refuse_unknown_hooks(relay, module, title)
        functions = _implementations(relay, module, title)
        records = [
            (kind, record)
            for kind in KINDS
            if f"{PROJECT}_{kind}" in functions
            for record in _records(kind, functions[f"{PROJECT}_{kind}"], installed)
        ]
    except (pluggy.PluginValidationError, ValueError, PluginError) as error:
        if relay.has_plugin(name):
            relay.unregister(name=name)
        if isinstance(error, PluginError):
            raise
        raise PluginBrokenError(f"{title} does not fit the hooks of this core: {error}") from error
    return Plugin(installed, tuple(sorted(functions)), tuple(records))


def _refuse_unknown_hooks(relay: pluggy.PluginManager, module: object, title: str) -> None:
    """A misspelt hook is an error: pluggy by itself would pass over it."""
    try:
        relay.check_pending()
    except pluggy.PluginValidationError:
        known = [name for name in dir(hooks) if name.startswith(f"{PROJECT}_")]
        unknown = [caller.name for caller in relay.get_hookcallers(module) or () if not caller.has_spec()]
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
        hints = (f"did you mean {', '.join(near)}?",) if near else ()
        raise PluginBrokenError(
            f"{title} implements {', '.join(unknown)}, which is not a hook of areal-core {areal_core.__version__}",
            hints=(*hints, f"hooks: {', '.join(known)}"),
        ) from None


def _implementations(relay: pluggy.PluginManager, module: object, title: str) -> dict[str, Callable[..., object]]:
    """The functions of a plugin by their hooks; a wrapper is an error, for it hides whose mistake an exception is."""
    functions: dict[str, Callable[..., object]] = {}
    for caller in relay.get_hookcallers(module) or ():
        implementation = next(each for each in caller.get_hookimpls() if each.plugin is module)
        if implementation.wrapper or implementation.hookwrapper:
            raise PluginBrokenError(f"{title} wraps {caller.name}; hooks of areal cannot be wrapped")
        functions[caller.name] = implementation.function
    return functions


def _records(kind: str, function: Callable[..., object], installed: Installed) -> Iterable[Record]:
    """What a plugin supplies of one kind, checked, and stamped with who supplied it."""
    hook, expected = f"{PROJECT}_{kind}", RECORD_TYPES[kind]
    try:
        answer = function()
        records = [answer] if isinstance(answer, Record) else list(answer)  # type: ignore[call-overload]
    except Exception as error:
        raise PluginBrokenError(f"{installed.title} fails in {hook}: {describe_error(error)}") from error
    strangers = {type(record).__name__ for record in records if type(record) is not expected}
    if strangers:
        faults = [f"returned {', '.join(sorted(strangers))}, not {expected.__name__}"]
    else:
        names = [record.name for record in records]
        faults = [fault for record in records for fault in record.faults()]
        faults += [f"supplies '{name}' twice" for name in sorted(set(names)) if names.count(name) > 1]
    if faults:
        raise PluginBrokenError(f"{installed.title}: {hook} is invalid: {'; '.join(faults)}")
    stamp = {"plugin": installed.name, "distribution": installed.distribution, "version": installed.version}
    return [dataclasses.replace(record, **stamp) for record in records]
