"""The texts of "there is no such component" and of "there are several": what was meant, and how to write it.

Only here, and for `areal plugins`, are the record modules of plugins that nobody named imported, each guarded.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from areal_core.errors import ComponentNotFoundError, PluginConflictError
from areal_core.plugins.catalog import FIRST_PARTY, SUPPLIERS, Catalog, install_command
from areal_core.plugins.records import KINDS, Record, normalize, with_article
from areal_core.plugins.survey import survey

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def ambiguous(kind: str, suppliers: Sequence[Record]) -> PluginConflictError:
    """The error for a bare name that several loaded plugins supply; it is one only where the name is written."""
    owners = " and by ".join(record.supplier for record in suppliers)
    return PluginConflictError(
        f"the {KINDS[kind]} '{suppliers[0].name}' is supplied by {owners}",
        hints=(f"write its full name: {' or '.join(record.reference for record in suppliers)}",),
    )


def not_found(
    kind: str, reference: str, *, loaded: Sequence[tuple[str, Record]], failed: Collection[str], catalog: Catalog
) -> ComponentNotFoundError:
    """The error for a reference that no loaded plugin answers to."""
    plugin, _, name = (normalize(part) for part in reference.rpartition("/"))
    suppliers = {record.plugin: record.supplier for _, record in loaded}
    subject = f"{suppliers.get(plugin, f'plugin {plugin}')} supplies" if plugin else "the loaded plugins supply"
    others = [] if plugin else survey(catalog, skip={*suppliers, *failed})
    unnamed = [record for other in others for its_kind, record in other.records if its_kind == kind]
    meant = _meant(kind, name, [each for each in loaded if plugin in ("", each[1].plugin)], unnamed)
    supplier = SUPPLIERS.get((kind, name), name)
    if not meant and supplier in FIRST_PARTY and supplier not in catalog.names():
        meant = f"the plugin '{supplier}' is not installed; install it with: {install_command(supplier)}"
    elif not meant and supplier != name:
        meant = f"did you mean '{supplier}/{name}'?"
    available = sorted(record.reference for its_kind, record in loaded if its_kind == kind)
    hints = (
        meant or "write your own and name it by import: path/to/file.py:attribute or package.module:attribute",
        f"available for {kind}: {', '.join(available) or 'nothing in the loaded plugins'}",
    )
    return ComponentNotFoundError(f"{subject} no {KINDS[kind]} named '{name}'", hints=hints)


def _meant(kind: str, name: str, loaded: Sequence[tuple[str, Record]], unnamed: Sequence[Record]) -> str:
    """What was probably meant, and how to write it; an empty line if nothing comes near."""
    for its_kind, record in loaded:
        if record.name == name:
            return f"'{record.reference}' is {with_article(KINDS[its_kind])}, not {with_article(KINDS[kind])}"
    suppliers = [
        f"the installed plugin {record.plugin}: write '{record.reference}' or add --plugins {record.plugin}"
        for record in unnamed
        if record.name == name
    ]
    if suppliers:
        return f"'{name}' is supplied by {'; also by '.join(suppliers)}"
    same_kind = [record for its_kind, record in loaded if its_kind == kind]
    references = {record.name: record.reference for record in [*unnamed, *same_kind]}
    near = difflib.get_close_matches(name, references, n=1)
    return f"did you mean '{references[near[0]]}'?" if near else ""
