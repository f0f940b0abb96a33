"""Data sets out of tables: the Hugging Face hub, local files, and plain lines of JSON."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from areal_core.errors import ConfigError
from areal_rewards.libraries import load_library
from areal_rewards.templates import columns_of, fill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from areal_rewards.config import FilesSettings, HubSettings, JSONLinesSettings, TableSettings

PROMPTED = frozenset({"prompt", "messages", "chosen"})
"""Columns of which each holds a prompt: by itself, in a conversation, or before a preferred answer."""
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


class Table:
    """A `Dataset` over rows that lie somewhere else, with the templates of `TableSettings` applied on access.

    Values that are no JSON, such as images and times, are left out of a row: it travels between processes.

    Args:
        rows: what the columns are read from.
        columns: of all rows.
        settings: the templates.
        title: names the source in errors.

    Raises:
        ConfigError: there is no row, a template names a column that there is not, or nothing gives a prompt.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], settings: TableSettings, title: str):
        self._rows, self._after, self._title = rows, settings.answer_after, title
        self._length = len(rows) if settings.limit is None else min(settings.limit, len(rows))
        given = {"prompt": settings.prompt, "answer": settings.answer, "completion": settings.completion}
        self._templates = {key: template for key, template in given.items() if template is not None}
        if not self._length:
            raise ConfigError(f"{title} is empty; it must have at least one row")
        for key, template in self._templates.items():
            for name in columns_of(template):
                if name not in columns:
                    raise ConfigError(f"{key}: {title} has no column '{name}'; it has {', '.join(columns)}")
        if "prompt" not in self._templates and PROMPTED.isdisjoint(columns):
            raise ConfigError(
                f"{title} has no column 'prompt'; it has {', '.join(columns)}: give a template, such as "
                f"prompt: '{{{columns[0]}}}'"
            )
        if self._after is not None and "answer" not in self._templates and "answer" not in columns:
            raise ConfigError(f"answer_after is given, and {title} has no column 'answer': give a template, answer")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        try:
            source = self._rows[index]
        except Exception as error:  # a library may look into a row only when it is asked for
            words = f"row {index} of {self._title} cannot be read: {type(error).__name__}: {error}"
            raise ValueError(words) from error
        row = {key: value for key, value in source.items() if _is_json(value)}
        for key, template in self._templates.items():
            try:
                row[key] = fill(template, source)
            except KeyError as error:
                raise ValueError(f"{key}: row {index} of {self._title} has no column {error}") from None
        if self._after is not None and isinstance(answer := row.get("answer"), str):
            row["answer"] = answer.rpartition(self._after)[2].strip()
        return row


class LocalFiles(Table):
    """Rows of local files."""

    _paths: Sequence[Path]

    def fingerprint(self) -> str:
        """A digest of the files."""
        return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in self._paths)).hexdigest()


class JSONLinesDataset(LocalFiles):
    """Rows of files with one JSON object a line. Blank lines are passed over.

    Raises:
        ConfigError: a file is missing, or a line of it is no JSON object.
    """

    def __init__(self, settings: JSONLinesSettings) -> None:
        _refuse_missing(settings.paths)
        self._paths = settings.paths
        found = [(path, line, row) for path in settings.paths for line, row in _json_lines(path)]
        rows = [row for _, _, row in found]
        self._places = [(path, line) for path, line, _ in found]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        super().__init__(rows, columns, settings, _title(settings.paths))

    def describe_row(self, index: int) -> str:
        """The file and the line, from 1, that a row stands in."""
        path, line = self._places[index]
        return f"{path}:{line}"


class FilesDataset(LocalFiles):
    """Rows of local files, read by the Hugging Face library `datasets`.

    Raises:
        ConfigError: the library or a file is missing, the format is unclear, or a file cannot be read.
    """

    def __init__(self, settings: FilesSettings) -> None:
        library = load_library("the data set files", "datasets", "datasets")
        _refuse_missing(settings.paths)
        self._paths = settings.paths
        title = _title(settings.paths)
        if all(path.stat().st_size == 0 for path in settings.paths):
            raise ConfigError(f"{title} is empty; it must have at least one row")
        files = [str(path) for path in settings.paths]
        rows = _loaded(library, title, settings.format or _format(settings.paths), data_files=files, split="train")
        super().__init__(rows, rows.column_names, settings, title)


class HubDataset(Table):
    """Rows of a data set of the Hugging Face hub, or of a folder in one of the hub's layouts.

    Raises:
        ConfigError: the library is missing, or it cannot find or read the data set.
    """

    def __init__(self, settings: HubSettings) -> None:
        library = load_library("the data set hub", "datasets", "datasets")
        title = f"the data set {settings.name}"
        rows = _loaded(library, title, settings.name, settings.subset, split=settings.split, revision=settings.revision)
        super().__init__(rows, rows.column_names, settings, f"{title} ({settings.split})")


def _loaded(library: Any, title: str, *arguments: Any, **options: Any) -> Any:
    """`datasets.load_dataset`, whose many kinds of exceptions all become one."""
    try:
        return library.load_dataset(*arguments, **options)
    except Exception as error:
        innermost = error.__cause__ or error
        cause = next(iter(str(innermost).splitlines()), "")
        raise ConfigError(f"{title} cannot be read: {type(innermost).__name__}: {cause}") from error


def _refuse_missing(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"{path} {_what_it_is(path)}",
                hints=["a path is relative to the config file that names it, one in a preset to the current folder"],
            )


def _what_it_is(path: Path) -> str:
    """What stands where a file should, in words."""
    if path.is_dir():
        return "is a folder; name the files in it"
    if path.is_symlink() and not path.exists():
        return "is a symbolic link that leads to no file"
    return "is a pipe or a device; write its rows to a file and name that" if path.exists() else "does not exist"


def _format(paths: Sequence[Path]) -> str:
    """The format that all files' endings agree on."""
    endings = sorted({path.suffix for path in paths})
    formats = {_FORMATS.get(ending, "") for ending in endings}
    if len(formats) != 1 or "" in formats:
        raise ConfigError(
            f"the format of files that end in {' and '.join(ending or 'nothing' for ending in endings)} is unclear; "
            "set format to json, parquet or csv"
        )
    return formats.pop()


def _title(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"the data set of {len(paths)} files from {paths[0]}"


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a file, each with its line."""
    rows, number = [], 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}:{number} is a {type(row).__name__}, it must be an object, {{...}}")
                rows.append((number, row))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, behind line {number}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number} is no JSON: {error}") from None
    return rows


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(part) for part in value)
    return value is None or isinstance(value, str | int | float)
