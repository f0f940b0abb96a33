"""Data sets from tables: the Hugging Face hub, local files, and JSON Lines."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.data import ArrowRows
from areal_core.errors import ConfigError
from areal_core.plugins import register
from areal_rewards.config import FilesSettings, HubSettings, JSONLinesSettings
from areal_rewards.libraries import load_library
from areal_rewards.readers import SourceRow, read_csv, read_json, read_json_lines
from areal_rewards.templates import columns_of, fill, is_one_column

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from areal_rewards.config import TableSettings

PROMPTED = frozenset({"prompt", "messages", "conversations", "conversation", "chosen"})
"""Columns that hold a prompt: alone, as the start of a conversation, or before a preferred answer."""
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_CSV_OPTIONS_READ: Final = frozenset({"delimiter", "sep"})
_RETYPED: Final = (
    "so the library `datasets` reads them, which may turn text into numbers and times: check the rows, or download the "
    "files and use rewards/files"
)
_OF_EVERY_BUILDER: Final = frozenset({"data_dir", "data_files", "description", "features", "name", "version"})
"""Options of every builder of `datasets`; they do not change how files are read."""


class Table:
    """A `Dataset` over rows of a source. The templates of `TableSettings` are applied when a row is accessed.

    A row holds every column, as text, numbers, lists, mappings and bytes. `notes` lists the differences from the
    source.

    Args:
        rows: rows of the source.
        columns: names of all columns.
        settings: templates and limit.
        title: name of the source in errors.
        notes: notes about the source; see `Dataset.notes`.
        places: place of each row, such as file and line; None if only the source is known.

    Raises:
        ConfigError: the source has no rows, a template names a column that is missing or null, or there is no prompt.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] | ArrowRows,
        columns: Sequence[str],
        settings: TableSettings,
        title: str,
        notes: Sequence[str] = (),
        places: Sequence[str] | None = None,
    ) -> None:
        self._rows = rows
        self._after = settings.answer_after
        self._title = title
        self._places = places
        self._notes = [f"{title}: {note}" for note in notes]
        self._length = len(rows) if settings.limit is None else min(settings.limit, len(rows))
        templates = {"prompt": settings.prompt, "answer": settings.answer, "completion": settings.completion}
        self._templates = {key: template for key, template in templates.items() if template is not None}
        if not self._length:
            raise ConfigError(f"{title} is empty; it must have at least one row", hints=self._notes)
        for key, template in self._templates.items():
            for name in columns_of(template):
                if name not in columns:
                    raise ConfigError(
                        f"{key}: {title} has no column '{name}'; it has {', '.join(columns)}", hints=self._notes
                    )
        if "prompt" not in self._templates and PROMPTED.isdisjoint(columns):
            raise ConfigError(
                f"{title} has no column 'prompt'; it has {', '.join(columns)}: give a template, such as "
                f"prompt: '{{{next(iter(columns), 'question')}}}'. For fine-tuning, put conversations into a column "
                "'messages'",
                hints=self._notes,
            )
        if self._after is not None and "answer" not in self._templates and "answer" not in columns:
            raise ConfigError(f"answer_after is set, but {title} has no column 'answer': give a template, answer")
        for key, template in self._templates.items():
            if not is_one_column(template):
                self._refuse_nulls(key, columns_of(template))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        try:
            source = self._rows[index]
        except Exception as error:  # some libraries decode a row only when it is accessed
            message = f"row {index} of {self._title} cannot be read: {type(error).__name__}: {error}"
            raise ValueError(message) from error
        row = dict(source)
        for key, template in self._templates.items():
            try:
                row[key] = fill(template, source)
            except KeyError as error:
                raise ValueError(f"{key}: row {index} of {self._title} has no column {error}") from None
            except ValueError as error:
                raise ValueError(f"{key}: row {index} of {self._title}: {error}") from None
        if self._after is not None and isinstance(answer := row.get("answer"), str):
            row["answer"] = answer.rpartition(self._after)[2].strip()
        return row

    def notes(self) -> Sequence[str]:
        """Return the differences from the source; see `Dataset.notes`."""
        return self._notes

    def describe_row(self, index: int) -> str:
        """Return the file and line of a row, or the name of the source if no line is known."""
        return self._title if self._places is None else self._places[index]

    def _refuse_nulls(self, key: str, names: Sequence[str]) -> None:
        """Refuse columns with nulls if a template writes them into a text, where they would become `None`."""
        for name in names:
            place = _first_null(self._rows, name, self._length)
            if place is not None:
                raise ConfigError(
                    f"{key}: column '{name}' is null in row {place} (counted from 0; {self.describe_row(place)}), but "
                    "a template cannot write null: fill it in, or leave such rows out"
                )


class LocalFiles(Table):
    """A table of rows from local files."""

    _paths: Sequence[Path]

    def fingerprint(self) -> str:
        """Return the SHA-256 digest of the files' contents."""
        return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in self._paths)).hexdigest()


@register("datasets", "jsonl", summary="local JSON Lines files, read without any library")
class JSONLinesDataset(LocalFiles):
    """Rows of files with one JSON object per line. Blank lines are skipped.

    Raises:
        ConfigError: a file is missing, or a line is not a JSON object.
    """

    Config = JSONLinesSettings

    def __init__(self, settings: JSONLinesSettings) -> None:
        _refuse_missing(settings.paths)
        self._paths = settings.paths
        source_rows = [source_row for path in settings.paths for source_row in read_json_lines(path)]
        super().__init__(
            *_table(source_rows),
            settings,
            _title(settings.paths),
            places=[source_row.place for source_row in source_rows],
        )


@register("datasets", "files", summary="local files: json, jsonl, parquet, csv")
class FilesDataset(LocalFiles):
    """Rows of local files. JSON and CSV are read exactly; the Hugging Face library `datasets` reads parquet.

    Raises:
        ConfigError: the library or a file is missing, the format is unclear, or a file cannot be read.
    """

    Config = FilesSettings

    def __init__(self, settings: FilesSettings) -> None:
        _refuse_missing(settings.paths)
        self._paths = settings.paths
        title = _title(settings.paths)
        kind = settings.format or _format(settings.paths)
        if kind != "parquet":
            source_rows = _read(kind, settings.paths, settings.delimiter)
            super().__init__(
                *_table(source_rows), settings, title, places=[source_row.place for source_row in source_rows]
            )
            return
        library = load_library("the data set files", "datasets", "datasets")
        if all(path.stat().st_size == 0 for path in settings.paths):
            raise ConfigError(f"{title} is empty; it must have at least one row")
        files = [str(path) for path in settings.paths]
        rows = ArrowRows(_loaded(title, library.load_dataset, kind, data_files=files, split="train"))
        super().__init__(rows, rows.columns, settings, title, rows.notes)


@register("datasets", "hub", summary="rows of a data set on the Hugging Face hub")
class HubDataset(Table):
    """Rows of a data set on the Hugging Face hub, or of a folder in one of the hub's layouts.

    The library `datasets` downloads JSON and CSV files, and they are read exactly, as `FilesDataset` reads them. The
    library itself reads all other formats.

    Raises:
        ConfigError: the library is not installed, or it cannot find or read the data set.
    """

    Config = HubSettings

    def __init__(self, settings: HubSettings) -> None:
        library = load_library("the data set hub", "datasets", "datasets")
        name = f"the data set {settings.name}"
        title = f"{name} ({settings.split})"
        builder = _loaded(
            name, library.load_dataset_builder, settings.name, settings.subset, revision=settings.revision
        )
        if (
            builder.name in ("csv", "json")
            and builder.config.data_files
            and not (unread_options := _unread_options(builder))
        ):
            source_rows = _loaded(name, _downloaded, library, builder, settings.split)
            super().__init__(
                *_table(source_rows), settings, title, places=[source_row.place for source_row in source_rows]
            )
            return
        rows = ArrowRows(
            _loaded(
                name,
                library.load_dataset,
                settings.name,
                settings.subset,
                split=settings.split,
                revision=settings.revision,
            )
        )
        notes = list(rows.notes)
        if builder.name in ("csv", "json") and builder.config.data_files:
            notes.append(f"its card sets {', '.join(unread_options)} for {builder.name} files, {_RETYPED}")
        elif metadata := _metadata_files(builder):
            notes.append(f"it has {metadata[0]} in addition to its files, {_RETYPED}")
        super().__init__(rows, rows.columns, settings, title, notes)


def _loaded(title: str, read: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function of `datasets`, and turn all its exceptions into ConfigError."""
    try:
        return read(*arguments, **options)
    except ConfigError:
        raise
    except Exception as error:
        innermost = error.__cause__ or error
        cause = next(iter(str(innermost).splitlines()), "")
        hint = "store that column as text, numbers, lists or structs" if "dtype equivalent" in cause else ""
        raise ConfigError(
            f"{title} cannot be read: {type(innermost).__name__}: {cause}", hints=[hint] if hint else []
        ) from error


def _read(
    kind: str, paths: Sequence[Path], delimiter: str | None, text_columns: Collection[str] = ()
) -> list[SourceRow]:
    if kind == "csv":
        return read_csv(paths, delimiter, text_columns)
    return [row for path in paths for row in read_json(path)]


def _table(source_rows: Sequence[SourceRow]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows, and the names of all their columns."""
    rows = [source_row.row for source_row in source_rows]
    return rows, list(dict.fromkeys(name for row in rows for name in row))


def _first_null(rows: Any, name: str, length: int) -> int | None:
    if isinstance(rows, ArrowRows):
        return rows.first_null(name, length)
    return next((index for index in range(length) if name in rows[index] and rows[index][name] is None), None)


def _unread_options(builder: Any) -> list[str]:
    """Return the options that a data set's card sets for its files and that our readers do not implement."""
    config, plain = builder.config, type(builder.config)()
    read_options = _OF_EVERY_BUILDER | (_CSV_OPTIONS_READ if builder.name == "csv" else set())
    return [name for name, value in vars(plain).items() if name not in read_options and getattr(config, name) != value]


def _metadata_files(builder: Any) -> list[str]:
    """Return the names of metadata text files that accompany files of another kind, such as images."""
    paths = [str(path) for paths in (builder.config.data_files or {}).values() for path in paths]
    return [
        name for path in paths if (name := path.rpartition("/")[2]).startswith("metadata.") and "parquet" not in name
    ]


def _downloaded(library: Any, builder: Any, split: str) -> list[SourceRow]:
    """Return the rows of a split, such as `train[:90%]`, from the files that a builder of `datasets` lists."""
    files: Mapping[Any, Any] = {str(name): paths for name, paths in builder.config.data_files.items()}
    names = [name for name in files if split == "all" or re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", split)]
    manager = library.DownloadManager(
        dataset_name=builder.dataset_name,
        base_path=builder.base_path,
        download_config=library.DownloadConfig(token=builder.token),
    )
    features = builder.info.features or {}
    text_columns = [name for name, feature in features.items() if "string" in str(getattr(feature, "dtype", ""))]
    rows_by_split = {}
    for name in names:
        paths = [Path(path) for path in manager.iter_files(manager.download_and_extract(list(files[name])))]
        delimiter = None
        if builder.name == "csv":
            delimiter = next(
                (sign for sign in (builder.config.delimiter, builder.config.sep) if sign not in (None, ",")), None
            )
        rows_by_split[name] = _read(builder.name, paths, delimiter, text_columns)
    if split == "all":
        return [row for name in names for row in rows_by_split[name]]
    lengths = {name: len(rows_by_split.get(name, ())) for name in files}
    parts = library.ReadInstruction.from_spec(split).to_absolute(lengths)
    return [row for part in parts for row in rows_by_split[part.splitname][part.from_ : part.to]]


def _refuse_missing(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"{path} {_describe_missing(path)}",
                hints=["a path is relative to the config file that names it, one in a preset to the current folder"],
            )


def _describe_missing(path: Path) -> str:
    """Describe what is at a path instead of a file."""
    if path.is_dir():
        return "is a folder; name the files in it"
    if path.is_symlink() and not path.exists():
        return "is a symbolic link to a file that does not exist"
    return "is a pipe or a device; write its rows to a file and name that" if path.exists() else "does not exist"


def _format(paths: Sequence[Path]) -> str:
    """Return the format that the endings of all files agree on."""
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
