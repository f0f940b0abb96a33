"""Rows of Arrow tables as plain values: what `datasets` reads from parquet, from its cache, or from the hub.

Arrow gives every struct every field, and null where the struct had none. Such nulls are removed here, at one place for
every reader. Types that a row cannot carry between processes become text, or their column is left out and reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any, Final

_UNKNOWN: Final = object()
"""The feature of a value whose type the table does not describe: its mappings are structs."""
_WHOLE: Final = object()
"""The feature of a value in which nulls are the user's own, such as decoded JSON."""
_AS_TEXT: Final = {
    "timestamp": "times, as ISO text",
    "date": "dates, as ISO text",
    "time": "times of day, as ISO text",
    "decimal": "decimals, as text",
}
"""Beginnings of Arrow's names of types, and what a row holds instead."""
_NOT_CARRIED: Final = {"duration": "durations", "month_day_nano": "intervals"}
"""Beginnings of Arrow's names of types that no row can carry."""


class ArrowRows:
    """The rows of a `datasets.Dataset` as plain values.

    Images, audio and other files are not decoded: a row holds them as they are stored, `{bytes, path}`.

    Attributes:
        columns: names of the columns that rows have.
        notes: what rows hold differently from the table, one sentence for each kind; see `Dataset.notes`.

    Args:
        table: a `datasets.Dataset`, or an `IterableDataset`, which has no length.

    Example:
        >>> import datasets
        >>> from areal_core.data import ArrowRows
        >>> calls = [{"name": "add", "strict": None}, {"name": "exit", "strict": True}]
        >>> rows = ArrowRows(datasets.Dataset.from_list([{"prompt": "2+2?", "calls": calls}]))
        >>> len(rows), rows.columns
        (1, ['prompt', 'calls'])
        >>> rows[0]
        {'prompt': '2+2?', 'calls': [{'name': 'add'}, {'name': 'exit', 'strict': True}]}
    """

    def __init__(self, table: Any) -> None:
        table = _unformatted(table)
        self._features: Mapping[str, Any] = dict(getattr(table, "features", None) or {})
        self.notes: list[str] = []
        for name, feature in self._features.items():
            if (stored := _stored(feature)) != feature:
                table = table.cast_column(name, stored)
                self._features = {**self._features, name: stored}
        left_out = []
        for name, feature in self._features.items():
            types = list(_types(feature))
            if refused := _named(types, _NOT_CARRIED):
                left_out.append(name)
                self.notes.append(
                    f"column '{name}' holds {refused}, which no row can carry: it is left out; store it as a number or "
                    "as text to use it"
                )
            elif changed := _named(types, _AS_TEXT):
                self.notes.append(f"column '{name}' holds {changed}")
        self._table = table.remove_columns(left_out) if left_out else table
        self.columns: list[str] = list(self._table.column_names or ())

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._plain(self._table[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._plain, self._table)

    def first_null(self, name: str, length: int) -> int | None:
        """Return the number of the first row, of so many, in which a column is null; None if there is none."""
        if not self._table.data.column(name).null_count:
            return None
        values = self._table.select_columns([name])
        return next((index for index in range(length) if values[index][name] is None), None)

    def _plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: plain_value(value, self._features.get(name, _UNKNOWN)) for name, value in row.items()}


def plain_value(value: Any, feature: Any = _UNKNOWN) -> Any:
    """Return a value of a table without the null fields of its structs, as what JSON and bytes can hold.

    Null elements of lists stay, and so does a value that is null itself.

    Args:
        value: as `datasets` returns it.
        feature: the feature of `datasets` that describes it.
    """
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    if isinstance(value, date | time | Decimal):  # a datetime is a date
        return format(value, "f") if isinstance(value, Decimal) else value.isoformat()
    if isinstance(value, Mapping):
        return _plain_fields(value, feature)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        return [plain_value(part, inner) for part in value]
    return value


def _unformatted(table: Any) -> Any:
    """Return a table that hands out Python's own values, of the same columns; a transform of the user's stays."""
    formatting = getattr(table, "format", None) or {}
    if formatting.get("type") == "custom" or not hasattr(table, "with_format"):
        return table
    columns = table.column_names if formatting.get("output_all_columns") else formatting.get("columns")
    table = table.with_format(None)
    return table if columns is None or set(columns) == set(table.column_names) else table.select_columns(columns)


def _plain_fields(value: Mapping[Any, Any], feature: Any) -> dict[Any, Any]:
    if feature is not _UNKNOWN and not isinstance(feature, Mapping):
        return {key: plain_value(part, _WHOLE) for key, part in value.items()}
    inner = feature if isinstance(feature, Mapping) else {}
    return {key: plain_value(part, inner.get(key, _UNKNOWN)) for key, part in value.items() if part is not None}


def _stored(feature: Any) -> Any:
    """Return a feature that hands out files as they are stored, not decoded."""
    if isinstance(feature, Mapping):
        return {name: _stored(part) for name, part in feature.items()}
    if isinstance(feature, list):
        return [_stored(part) for part in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_stored(feature.feature))
    if getattr(feature, "decode", False) and type(feature).__name__ != "Json":
        return dataclasses.replace(feature, decode=False)
    return feature


def _types(feature: Any) -> Iterator[str]:
    """Yield Arrow's names of the types in a feature."""
    if isinstance(feature, Mapping | list):
        for part in feature.values() if isinstance(feature, Mapping) else feature:
            yield from _types(part)
    elif hasattr(feature, "feature"):
        yield from _types(feature.feature)
    else:
        yield str(getattr(feature, "dtype", ""))


def _named(types: list[str], kinds: Mapping[str, str]) -> str:
    return " and ".join(dict.fromkeys(text for name in types for kind, text in kinds.items() if _is_of(name, kind)))


def _is_of(name: str, kind: str) -> bool:
    """Return whether a type's name, such as `date32` or `timestamp[us]`, is of a kind; `timestamp` is not a `time`."""
    return name.partition("[")[0].partition("(")[0].rstrip("0123456789") == kind
