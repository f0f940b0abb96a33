"""Templates that make a prompt, an answer or a completion from a row. `{name}` stands for a column."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMATTER = string.Formatter()


def columns_of(template: str) -> list[str]:
    """Return the columns that a template names.

    Raises:
        ValueError: a brace is not closed, or contains more than the name of a column.
    """
    names = []
    for _, name, specification, conversion in _FORMATTER.parse(template):
        if name is None:
            continue
        if not name or specification or conversion or any(sign in name for sign in ".[]"):
            raise ValueError(f"'{{{name}}}' is not the name of a column in braces; a brace itself is written twice")
        names.append(name)
    return names


def is_one_column(template: str) -> bool:
    """Return whether a template is one column and nothing else, which keeps its type, such as chat messages."""
    names = columns_of(template)
    return len(names) == 1 and template == f"{{{names[0]}}}"


def fill(template: str, row: Mapping[str, Any]) -> Any:
    """Return the template filled with the row's values. A template that is one column returns its value unchanged.

    Raises:
        KeyError: the row lacks a column.
        ValueError: a column is null or bytes, which cannot be written into a text.
    """
    names = columns_of(template)
    if is_one_column(template):
        return row[names[0]]
    for name in names:
        if row[name] is None or isinstance(row[name], bytes):
            kind = "null" if row[name] is None else "bytes"
            raise ValueError(f"column '{name}' is {kind}, which a template cannot write into a text")
    return _FORMATTER.vformat(template, (), row)
