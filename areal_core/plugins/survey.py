"""A look at every installed plugin, broken ones included: for `areal plugins` and for composing errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.errors import PluginError
from areal_core.plugins.catalog import CORE, CORE_DISTRIBUTION, Catalog
from areal_core.plugins.manager import PluginManager

if TYPE_CHECKING:
    from collections.abc import Collection

    from areal_core.plugins.records import Record


@dataclass(frozen=True)
class Report:
    """What one plugin supplies, or why it cannot be loaded (`cause`)."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    records: tuple[tuple[str, Record], ...] = ()
    cause: PluginError | None = None


def survey(catalog: Catalog, skip: Collection[str] = ()) -> list[Report]:
    """Load each installed plugin by itself, so that one that is broken or in conflict hides no other."""
    reports = []
    for entry in catalog.entries():
        if entry.name in skip:
            continue
        manager = PluginManager(catalog=catalog)
        try:
            manager.add([entry.name])
        except PluginError as error:
            reports.append(Report(entry.name, entry.distribution, entry.version, cause=error))
        else:
            reports.append(_report(manager, entry.name, entry.distribution, entry.version))
    return reports


def core_report(catalog: Catalog) -> Report:
    """The same for the components that the core brings itself."""
    manager = PluginManager(catalog=catalog)
    return _report(manager, CORE, CORE_DISTRIBUTION, manager.provenance()[0].version)


def _report(manager: PluginManager, name: str, distribution: str, version: str) -> Report:
    records = tuple((kind, record) for kind, record in manager.records() if record.plugin == name)
    return Report(name, distribution, version, tuple(manager.hooks(name)), records)
