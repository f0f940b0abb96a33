"""`other_implementations.md`: what `make others` has measured, and every component that nothing was compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from algorithms_page import BASE, PARTS, PLUGINS, anchor

from areal_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.plugins import Component

MEASURED: Final = Path(__file__).with_suffix("").with_name("other_implementations.json")
KINDS: Final = [kind for kind in PARTS if kind != "example_tokenizers"]
"""Kinds with formulas. Trainers of the other libraries compare what example tokenizers do to rows."""
NOTHING_FOUND: Final = "no other implementation found"
"""None in what can be imported of the three libraries without a GPU."""
INTRODUCTION: Final = """# Other implementations

areal is compared with {versions}, exactly as PyPI has them. A test measures every night and
fails if a difference has grown or a definition has changed. `make others` measures, too, and writes this page; that
takes {minutes:g} minutes on two cores.

**{compared} of {components} components** are compared, in {functions} comparisons of functions and {trainers} of whole
trainers. {equal} of them compute the same as the other implementation, {different} are defined differently.

- **Functions** get {samples} random batches each: four prompts with four answers of one to three turns, with tokens of
  tools between the turns, answers that were cut off, and tokens of older weights. On areal's side the composed
  algorithm computes the loss from rewards and log-probabilities, in three micro-batches. The figures are the largest
  absolute differences of values and of gradients with respect to the model's outputs, in float32. The largest value
  and the largest gradient are in parentheses.
- **Trainers** train the same tiny model on the same rows with AdamW, for {updates} updates. The figures are the largest
  differences of the loss, of the gradient's norm, and of a parameter after any of the updates. The largest change of a
  parameter is in parentheses.

"No other implementation found" is about these three libraries, and about modules that can be imported without a GPU:
of OpenRLHF those are its losses. [tests/others](../../tests/others/cases.py) has the settings of each comparison."""
DIFFERENCES: Final = """## Where definitions differ

Each of these comparisons fails, too, once both sides agree. Where a setting makes them equal, another row shows it."""
TRAINERS: Final = """## Whole trainers

The trainers of verl and OpenRLHF need Ray and a GPU, so only TRL's are here. TRL's RLOO trainer cannot be given
answers."""


def page() -> str:
    """The whole page."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    functions, trainers = measured["functions"], measured["trainers"]
    versions = [f"{name} {version}" for name, version in measured["versions"].items()]
    rows = functions + trainers
    components = components_by_kind()
    names = {(kind, one.reference) for kind, found in components.items() for one in found}
    introduction = INTRODUCTION.format(
        versions=" and ".join((", ".join(versions[:-1]), versions[-1])),
        minutes=measured["minutes"],
        components=len(names),
        compared=len(names & {(row["kind"], row["component"]) for row in rows}),
        functions=len(functions),
        trainers=len(trainers),
        equal=sum(not row["differs"] for row in rows),
        different=sum(bool(row["differs"]) for row in rows),
        samples=measured["samples"],
        updates=measured["updates"],
    )
    parts = [introduction, DIFFERENCES, "\n".join(_differences(rows)), TRAINERS, "\n".join(_trainers(trainers))]
    for kind, found in components.items():
        parts += [f"## {kind.replace('_', ' ').capitalize()}", "\n".join(_functions(kind, found, rows))]
    return "\n\n".join(parts)


def components_by_kind() -> dict[str, list[Component]]:
    """Return the components that come with areal and have a formula, by kind, as the plugin system lists them.

    `core/policy_gradient` is left out: it has no formula of its own, and every comparison of a part goes through it.
    """
    manager = PluginManager.load(PLUGINS)
    return {
        kind: [one for one in manager.components(kind) if one.plugin in (*PLUGINS, "core") and one.config != BASE]
        for kind in KINDS
    }


def _differences(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a point for each difference, with the components and libraries that it is about."""
    for text in dict.fromkeys(row["differs"] for row in rows if row["differs"]):
        found = [row for row in rows if row["differs"] == text]
        components = dict.fromkeys(f"`{row['component']}`" for row in found)
        yield f"- {', '.join(components)} and {', '.join(dict.fromkeys(row['other'] for row in found))}: {text}"


def _trainers(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of trainers."""
    yield "| areal | other | loss | norm | parameters | note |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        figures = f"{row['loss']:.0e} | {row['norm']:.0e} | {row['parameters']:.0e} ({row['moved']:.0e})"
        component = f"{row['kind'].replace('_', ' ')} `{row['component']}`"
        yield f"| {component} | {row['other']} {row['function']} | {figures} | {_note(row)} |"


def _functions(kind: str, components: Sequence[Component], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a kind's table: one for each comparison, and one for each component without any."""
    yield "| component | other implementation | value | gradient | note |"
    yield "|---|---|---|---|---|"
    for one in components:
        link = f"[`{one.reference}`](algorithms.md#{anchor(kind, one)})"
        compared = [row for row in rows if (row["kind"], row["component"]) == (kind, one.reference)]
        if not compared:
            yield f"| {link} | {NOTHING_FOUND} | | | |"
        for row in compared:
            if "parameters" in row:
                figures = "[as a whole](#whole-trainers) | "
            else:
                figures = f"{_figure(row, 'value')} | {_figure(row, 'gradient')}"
            yield f"| {link} | {row['other']} {row['function']} | {figures} | {_note(row)} |"


def _figure(row: Mapping[str, Any], name: str) -> str:
    return "" if row[name] is None else f"{row[name]:.0e} ({row[f'largest_{name}']:.0e})"


def _note(row: Mapping[str, Any]) -> str:
    return "[defined differently](#where-definitions-differ)" if row["differs"] else row["note"]
