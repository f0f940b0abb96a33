"""`coming_from.md`: keys and concepts of other frameworks, in the words of `coming_from.yaml`.

AReaL's column, and what becomes of every one of its keys, are the table of `areal convert`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml

from areal_convert.convert import entries
from areal_convert.source import TABLE

WORDS: Final = Path(__file__).with_name("coming_from.yaml")
HEADS: Final = ("areal", "AReaL", "TRL", "verl", "prime-rl")


def carried() -> dict[str, list[str]]:
    """AReaL's keys by each of areal's, as a config has it: items of lists are not told apart."""
    found: dict[str, list[str]] = {}
    pairs = [(theirs, name) for theirs, ours, _, _ in entries() for name in ours.split()]
    for theirs, ours in [*pairs, *TABLE["together"].items()]:
        keys = found.setdefault(ours.partition(".+")[0], [])
        keys += [] if theirs in keys else [theirs]
    return found


def page() -> str:
    """The whole page."""
    text = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    areal = carried()
    concepts = [(idea, *cells) for idea, cells in text["concepts"].items()]
    keys = [(_code([key]), _code(areal.get(key, ())), *cells) for key, cells in text["keys"].items()]
    more = [(_code([ours]), _code(theirs)) for ours, theirs in areal.items() if ours not in text["keys"]]
    parts = ["# Coming from AReaL, TRL, verl or prime-rl", text["introduction"].strip()]
    parts += ["## Concepts", _table(("", *HEADS), concepts), "## Keys", _table(HEADS, keys)]
    parts += ["## Further keys of AReaL", _table(HEADS[:2], more)]
    alike = [(_code(names.split(", ")), _code([str(value)])) for names, value in TABLE["alike"].items()]
    parts += ["## Values of AReaL that areal has without a key", _table(("AReaL", "value"), alike)]
    for part, title in (("not_needed", "Keys of AReaL that are not needed"), ("lost", "Keys of AReaL that are lost")):
        rows = [(_code(names.split(", ")), words) for names, words in TABLE[part].items()]
        parts += [f"## {title}", _table(("AReaL", "why"), rows)]
    return "\n\n".join(parts)


def _code(keys: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
