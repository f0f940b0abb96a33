"""Rows of named values that print well: the metrics of steps, the answers of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

PRINTED_ROWS: Final = 10
PRINTED_WIDTH: Final = 48
"""Characters of a text that are printed."""


class Table(Sequence[dict[str, Any]]):
    """A list of dictionaries whose columns can be taken by name.

    Args:
        rows: the dictionaries. They need not have the same keys.
        printed: names of the columns that `print` shows; by default all of them.

    Example:
        >>> table = Table([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}])
        >>> table["reward"]
        [0.25, 0.5]
        >>> table[-1]
        {'step': 2, 'reward': 0.5}
        >>> table
        2 rows, 2 columns
        step  reward
           1    0.25
           2     0.5
    """

    def __init__(self, rows: Iterable[dict[str, Any]], printed: Sequence[str] = ()) -> None:
        self._rows = list(rows)
        self._printed = tuple(printed)

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which the rows first have them."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> dict[str, Any] | Table | list[Any]:
        """Return a row, a part of the table, or a column, in which None stands for what a row lacks.

        Raises:
            IndexError: there is no such row.
            KeyError: there is no such column.
        """
        if isinstance(key, int):
            return dict(self._rows[key])
        if isinstance(key, slice):
            return Table(self._rows[key], self._printed)
        if key not in self.columns:
            raise KeyError(f"there is no column {key!r}; columns: {', '.join(self.columns)}")
        return [row.get(key) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(dict, self._rows)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`. Raises `ImportError` if pandas is not installed."""
        import pandas

        return pandas.DataFrame(self._rows, columns=self.columns)

    def __repr__(self) -> str:
        columns = self.columns
        names = [name for name in self._printed if name in columns] or columns
        lines = [f"{len(self)} rows, {len(columns)} columns"]
        if len(self) > PRINTED_ROWS:
            lines[0] += f"; the last {PRINTED_ROWS}:"
        if not names:
            return lines[0]
        rows = self._rows[-PRINTED_ROWS:]
        shown = [[_shown(row.get(name)) for name in names] for row in rows]
        widths = [max(map(len, column)) for column in zip(names, *shown, strict=True)]
        sides = ["<" if any(isinstance(row.get(name), str) for row in rows) else ">" for name in names]
        for values in (names, *shown):
            cells = (f"{value:{side}{width}}" for value, side, width in zip(values, sides, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a value as the table prints it: four digits, one line."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= PRINTED_WIDTH else f"{text[: PRINTED_WIDTH - 1]}…"
