"""Read files of JSON and CSV exactly: no value is guessed, converted or dropped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

_COMPRESSED: Final = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
"""First bytes of compressed formats that are refused."""
_GZIP: Final = b"\x1f\x8b"
_OTHER_DELIMITERS: Final = ";\t|"
_LARGEST_CELL: Final = (1 << 31) - 1
"""Limit of a CSV cell in characters, in place of the library's 128 KiB."""
_LARGEST_INTEGER: Final = 1 << 63
"""Integers from here on stay text, because no column of int64 can hold them."""


class SourceRow(NamedTuple):
    """A row and its place: file and line, or element of an array."""

    row: dict[str, Any]
    place: str


def read_json_lines(path: Path) -> list[SourceRow]:
    """Return the rows of a file with one JSON object per line. Blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    return list(_lines(path, _text(path)))


def read_json(path: Path) -> list[SourceRow]:
    """Return the rows of a file with one JSON object per line, one array of objects, or a single object.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    text = _text(path)
    if text.lstrip().startswith("["):
        values = _parsed(text, str(path))
        return [SourceRow(_object(value, place), place) for value, place in _numbered(path, values)]
    try:
        return list(_lines(path, text))
    except ConfigError:
        try:  # one object written over several lines
            return [SourceRow(_object(_parsed(text, str(path)), str(path)), str(path))]
        except ConfigError:
            pass
        raise


def read_csv(
    paths: Sequence[Path], delimiter: str | None = None, text_columns: Collection[str] = ()
) -> list[SourceRow]:
    """Return the rows of CSV files with the same header.

    A column holds numbers if every cell of it is the canonical spelling of one: `7` and `0.5`, not `007`, `1e5`,
    `0.50`, `nan` or `True`. An empty cell is then null. Every other column is text exactly as written, and an empty
    cell is an empty text.

    Args:
        paths: files with the same columns, in any order.
        delimiter: character between cells. None: a comma; a header that seems to use another delimiter is refused.
        text_columns: columns that stay text.

    Raises:
        ConfigError: a file cannot be read, a row has another number of cells than the header, or headers differ.
    """
    header: list[str] | None = None
    cells: list[list[str]] = []
    places: list[str] = []
    for path in paths:
        names, rows = _csv_rows(path, delimiter)
        header = names if header is None else header
        if set(names) != set(header):
            raise ConfigError(f"{path} has the columns {', '.join(names)}, but {paths[0]} has {', '.join(header)}")
        order = [names.index(name) for name in header]
        for line, row in rows:
            cells.append([row[number] for number in order])
            places.append(f"{path}:{line}")
    header = header or []
    columns = {
        name: column if name in text_columns else _typed(column)
        for name, column in zip(header, map(list, zip(*cells, strict=True)), strict=False)
    }
    typed = zip(*columns.values(), strict=True)
    return [SourceRow(dict(zip(columns, row, strict=True)), place) for row, place in zip(typed, places, strict=True)]


def _csv_rows(path: Path, delimiter: str | None) -> tuple[list[str], list[tuple[int, list[str]]]]:
    csv.field_size_limit(_LARGEST_CELL)
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter or ",", strict=True)
    rows: list[tuple[int, list[str]]] = []
    try:
        header = next(reader, [])
        if repeated := sorted({name for name in header if header.count(name) > 1}):
            raise ConfigError(f"{path} has several columns '{repeated[0]}': give each its own name in the first line")
        other = next((sign for sign in _OTHER_DELIMITERS if len(header) == 1 and sign in header[0]), "")
        if other and delimiter is None:
            raise ConfigError(
                f"{path} has a single column, {header[0]!r}: set delimiter: {other!r} if its cells are separated by "
                "that, or delimiter: ',' if this is one name"
            )
        for row in reader:
            if row and len(row) != len(header):
                raise ConfigError(
                    f"{path}:{reader.line_num} has {len(row)} cells, but the first line has {len(header)}: put cells "
                    f"that contain {delimiter or ','!r} between double quotes"
                )
            if row:
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num} is not valid CSV: {error}") from None
    return header, rows


def _typed(cells: list[str]) -> list[Any]:
    """Return the cells of a column as numbers, with null for empty ones, if all of them are; else unchanged."""
    numbers = [None if cell == "" else _number(cell) for cell in cells]
    is_number = [number is not None or cell == "" for number, cell in zip(numbers, cells, strict=True)]
    return numbers if all(is_number) and any(number is not None for number in numbers) else cells


def _number(cell: str) -> int | float | None:
    """Return the number if a cell is its canonical spelling, or None if the cell is text."""
    for read, write in ((int, str), (float, repr)):
        try:
            number = read(cell)
        except ValueError:
            continue
        if write(number) == cell and (abs(number) < _LARGEST_INTEGER if read is int else math.isfinite(number)):
            return number
    return None


def _text(path: Path) -> str:
    """Return the text of a UTF-8 file, unpacked if it is gzipped.

    Raises:
        ConfigError: it cannot be read, is another archive, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if kind := next((kind for first, kind in _COMPRESSED.items() if data.startswith(first)), ""):
        raise ConfigError(f"{path} is a {kind} archive: unpack it and name the files in it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not UTF-8 text, in line {line}: {error.reason}") from None


def _lines(path: Path, text: str) -> Iterator[SourceRow]:
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield SourceRow(_object(_parsed(line, place), place), place)


def _numbered(path: Path, values: Any) -> Iterator[tuple[Any, str]]:
    return ((value, f"{path}, element {number} (counted from 0)") for number, value in enumerate(values))


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is a {type(value).__name__}; it must be an object, {{...}}")
    return value


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has several values for {next(n for n in values if names.count(n) > 1)!r}")
    return values
