"""Rows that a call was given: a file of JSON lines, which the processes of the run read."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.disk import open_private
from areal_core.errors import ConfigError
from areal_core.runtime.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

_BYTES = "areal_core.library:bytes"
"""The only key of an object that stands for bytes in the file of the rows."""


class Rows:
    """A data set of rows that were given to `train` as they are.

    Args:
        path: of the file that holds them, a JSON object a line.
        notes: what the rows hold differently from what was given; see `Dataset.notes`.
    """

    def __init__(self, path: str, notes: Sequence[str] = ()) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line, object_hook=_with_bytes) for line in lines]
        self._notes = list(notes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return dict(self._rows[index])

    def notes(self) -> Sequence[str]:
        """See `Dataset.notes`."""
        return self._notes


def write_rows(rows: Any) -> dict[str, Any]:
    """Write rows into a file of the cache. Return the data set that reads them, as a config writes it.

    Args:
        rows: dictionaries of what JSON can hold, and bytes; or a `datasets.Dataset`.

    Raises:
        ConfigError: a row holds something else, or `rows` has several splits.
    """
    if isinstance(rows, Mapping):
        raise ConfigError(f"dataset: has the splits {', '.join(rows)}: take one, as dataset[{next(iter(rows))!r}]")
    notes: list[str] = []
    if hasattr(rows, "column_names"):
        from areal_core.data.tables import ArrowRows

        rows = ArrowRows(rows)
        notes = rows.notes
    lines: list[str] = []
    try:
        for row in rows:
            lines.append(f"{json.dumps(_checked(dict(row)), default=_bytes_as_text)}\n")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset: row {len(lines)} (counted from 0): rows are dictionaries of what JSON can hold, "
            f"and bytes: {error}"
        ) from None
    named = {"notes": notes} if notes else {}
    return {"type": "areal_core.library:Rows", "path": str(_keep("".join(lines))), **named}


def _keep(text: str) -> Path:
    """Return a file of the cache that holds a text, under a name that is made of it."""
    path = cache_folder() / "library" / f"rows_{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():  # processes of another run may be reading it
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        with open_private(fresh, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    return path


def _checked(value: Any) -> Any:
    """Return a value that JSON reads as it was written.

    Raises:
        TypeError: a key is not text, or a value is a tuple, which JSON would silently make a list.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is {type(key).__name__}, and keys are text")
            _checked(part)
    elif isinstance(value, tuple):
        raise TypeError(f"{value!r:.60} is a tuple, which JSON makes a list: write a list")
    elif isinstance(value, list):
        for part in value:
            _checked(part)
    return value


def _bytes_as_text(value: Any) -> Any:
    """Return bytes as JSON can hold them; `_with_bytes` reads them."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is neither; an image is the bytes of its file, or its path")


def _with_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value
