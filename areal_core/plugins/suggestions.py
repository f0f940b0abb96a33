"""Errors for names of components: no such component, or several of that name. They propose what to write instead.

Only for these errors, and for `areal plugins`, are the modules of plugins imported that the config does not name.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from areal_core.errors import ComponentNotFoundError, PluginConflictError
from areal_core.plugins.catalog import FIRST_PARTY, SUPPLIERS, Catalog, install_command
from areal_core.plugins.records import Kind, Record, normalize, with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.plugins.registration import Plugin


def ambiguous(kind: Kind, suppliers: Sequence[Record]) -> PluginConflictError:
    """Return the error for a bare name that several loaded plugins supply."""
    owners = " and by ".join(record.supplier for record in suppliers)
    return PluginConflictError(
        f"the {kind.noun} '{suppliers[0].name}' is supplied by {owners}",
        hints=(f"write its full name: {' or '.join(record.reference for record in suppliers)}",),
    )


def not_found(
    kind: Kind,
    reference: str,
    kinds: Mapping[str, Kind],
    loaded: Sequence[tuple[str, Record]],
    others: Sequence[Plugin],
    catalog: Catalog,
) -> ComponentNotFoundError:
    """Return the error for a name that no loaded plugin has.

    Args:
        kind: of the component that was named.
        reference: its name.
        kinds: all kinds by name.
        loaded: records of the loaded plugins, each with the name of its kind.
        others: installed plugins that are not loaded.
        catalog: the installed plugins.
    """
    plugin, _, name = (normalize(part) for part in reference.rpartition("/"))
    suppliers = {record.plugin: record.supplier for _, record in loaded}
    subject = f"{suppliers.get(plugin, f'plugin {plugin}')} supplies" if plugin else "the loaded plugins supply"
    unnamed = [record for other in others for its_kind, record in other.records if its_kind == kind.name]
    proposal = _proposal(kind, name, kinds, [each for each in loaded if plugin in ("", each[1].plugin)], unnamed)
    supplier = SUPPLIERS.get((kind.name, name), name)
    if not proposal and supplier in FIRST_PARTY and supplier not in catalog.names():
        proposal = f"the plugin '{supplier}' is not installed; install it with: {install_command(supplier)}"
    elif not proposal and supplier != name:
        proposal = f"did you mean '{supplier}/{name}'?"
    available = sorted(record.reference for its_kind, record in loaded if its_kind == kind.name)
    hints = (
        proposal or "write your own and name it by import: path/to/file.py:attribute or package.module:attribute",
        f"available for {kind.name}: {', '.join(available) or 'nothing in the loaded plugins'}",
    )
    return ComponentNotFoundError(f"{subject} no {kind.noun} named '{name}'", hints=hints)


def _proposal(
    kind: Kind, name: str, kinds: Mapping[str, Kind], loaded: Sequence[tuple[str, Record]], unnamed: Sequence[Record]
) -> str:
    """Return what the user probably wanted and how to write it; an empty text if nothing comes near."""
    for its_kind, record in loaded:
        if record.name == name:
            noun = with_article(kinds[its_kind].noun)
            return f"'{record.reference}' is {noun}, not {with_article(kind.noun)}"
    suppliers = [
        f"the installed plugin {record.plugin}: write '{record.reference}' or add --plugins {record.plugin}"
        for record in unnamed
        if record.name == name
    ]
    if suppliers:
        return f"'{name}' is supplied by {'; also by '.join(suppliers)}"
    same_kind = [record for its_kind, record in loaded if its_kind == kind.name]
    references = {record.name: record.reference for record in [*unnamed, *same_kind]}
    near = difflib.get_close_matches(name, references, n=1)
    return f"did you mean '{references[near[0]]}'?" if near else ""
