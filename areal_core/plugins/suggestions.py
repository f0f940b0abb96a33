"""The text of "there is no such component": what was meant, which plugin has it, and what there is.

Only here, and for `areal plugins`, are the record modules of plugins that nobody named imported, each guarded.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from areal_core.errors import ComponentNotFoundError
from areal_core.plugins.catalog import FIRST_PARTY, Catalog
from areal_core.plugins.records import KINDS, Record, normalise, with_article

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def not_found(
    kind: str, reference: str, *, loaded: Sequence[tuple[str, Record]], failed: Collection[str], catalog: Catalog
) -> ComponentNotFoundError:
    """The error for a reference that no loaded plugin answers to."""
    plugin, _, name = (normalise(part) for part in reference.rpartition("/"))
    suppliers = {record.plugin: record.supplier for _, record in loaded}
    subject = f"{suppliers.get(plugin, f'plugin {plugin}')} supplies" if plugin else "the loaded plugins supply"
    unnamed = [] if plugin else _records_of_unnamed(kind, {*suppliers, *failed}, catalog)
    cure = _meant(kind, name, [found for found in loaded if plugin in ("", found[1].plugin)], unnamed)
    if not cure and name in FIRST_PARTY and name not in catalog.names():
        cure = f"the plugin '{name}' is not installed; install it with: pip install areal-{name}"
    available = sorted(record.reference for found, record in loaded if found == kind)
    hints = (
        cure or "write your own and name it by import: path/to/file.py:attribute or package.module:attribute",
        f"available for {kind}: {', '.join(available) or 'nothing in the loaded plugins'}",
    )
    return ComponentNotFoundError(f"{subject} no {KINDS[kind]} named '{name}'", hints=hints)


def _meant(kind: str, name: str, loaded: Sequence[tuple[str, Record]], unnamed: Sequence[Record]) -> str:
    """What was probably meant, and how to write it; an empty line if nothing comes near."""
    for found, record in loaded:
        if record.name == name:
            return f"'{record.reference}' is {with_article(KINDS[found])}, not {with_article(KINDS[kind])}"
    for record in unnamed:
        if record.name == name:
            return (
                f"'{name}' is supplied by the installed plugin {record.plugin}: "
                f"write '{record.reference}' or add --plugins {record.plugin}"
            )
    same_kind = [record for found, record in loaded if found == kind]
    references = {record.name: record.reference for record in [*unnamed, *same_kind]}
    near = difflib.get_close_matches(name, references, n=1)
    return f"did you mean '{references[near[0]]}'?" if near else ""


def _records_of_unnamed(kind: str, known: Collection[str], catalog: Catalog) -> list[Record]:
    """The records of installed plugins that nobody named; one that cannot be loaded supplies none."""
    from areal_core.plugins.survey import survey

    reports = survey(catalog, skip=known)
    return [record for report in reports for found, record in report.records if found == kind]
