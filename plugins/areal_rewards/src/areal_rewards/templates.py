"""Templates: how a row's columns become a prompt, an answer or a completion. `{name}` stands for a column."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMATTER = string.Formatter()


def columns_of(template: str) -> list[str]:
    """The columns that a template names.

    Raises:
        ValueError: a brace is not closed, or stands for more than the name of a column.
    """
    names = []
    for _, name, specification, conversion in _FORMATTER.parse(template):
        if name is None:
            continue
        if not name or specification or conversion or any(sign in name for sign in ".[]"):
            raise ValueError(f"'{{{name}}}' is not the name of a column in braces; a brace itself is written twice")
        names.append(name)
    return names


def fill(template: str, row: Mapping[str, Any]) -> Any:
    """The template with the row's values. One column and nothing else keeps its type, such as chat messages.

    Raises:
        KeyError: the row lacks a column.
    """
    names = columns_of(template)
    if len(names) == 1 and template == f"{{{names[0]}}}":
        return row[names[0]]
    return _FORMATTER.vformat(template, (), row)
