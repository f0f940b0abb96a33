"""What a run consists of, beside its checkpoints: records of plugins, files, modules, data sets and models.

`areal run` writes the records into the run folder (`plugins.json`). A resume and an audit compare them with the
present. `areal_core.plugins.provenance` has the record and hashes plugins.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.disk import is_folder, replace_durably, writing
from areal_core.errors import UsageError
from areal_core.files import PREFIX, KeptSources
from areal_core.plugins.provenance import Provenance
from areal_core.runs.models import MODEL_FILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from areal_core.interfaces.dataset import Dataset
    from areal_core.runtime.folder import RunFolder

_HASHED_ROWS: Final = 1000
"""Rows of a data set that are hashed, evenly spread over it."""
_SAMPLES: Final = 64
"""Places of a model's file that are hashed, evenly spread over it."""
_SAMPLE_BYTES: Final = 1 << 16
"""Bytes that are hashed at each place. A file of 4 MiB or less is hashed completely."""


def data_record(key: str, reference: str, dataset: Dataset) -> Provenance:
    """Return the record of a data set: its length, and its own `fingerprint` or a hash of some of its rows.

    Values that JSON cannot hold count by their type.

    Args:
        key: config key that names the data set.
        reference: what the config names.
        dataset: the data set.
    """
    length, digest, fingerprint = len(dataset), hashlib.sha256(), getattr(dataset, "fingerprint", None)
    count = 0 if callable(fingerprint) else min(length, _HASHED_ROWS)
    for number in range(count):
        row = dataset[number * (length - 1) // max(1, count - 1)]
        try:
            text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        except (TypeError, ValueError):  # keys that are no text
            text = ", ".join(map(str, row))
        digest.update(text.encode())
    source_hash = str(fingerprint()) if callable(fingerprint) else digest.hexdigest()
    return Provenance(key, "", f"{length} rows", reference, source_hash)


def module_records(modules: Mapping[str, str]) -> Iterator[Provenance]:
    """Yield the records of modules.

    A module that was imported from beside a component's file is named by its path, as the component's file is.

    Args:
        modules: names of modules, each with its file.
    """
    for name, path in sorted(modules.items()):
        yield Provenance(path if name.startswith(PREFIX) else f"module {name}", "", "", path, _hash(Path(path)))


def model_records(run: RunFolder, folders: Mapping[str, Path]) -> Iterator[Provenance]:
    """Yield the records of models: the one that a source has made for the run, and others.

    Args:
        run: the run's folder, in which the made model is noted.
        folders: folders of the other models, by the config key that names each.
    """
    made = {"model.path": Path(run.model_note.read_text())} if run.model_note.is_file() else {}
    for key, folder in {**made, **folders}.items():
        if is_folder(folder):
            yield Provenance(key, "", "", str(folder), _hash_model(folder))


def _hash_model(folder: Path) -> str:
    digest = hashlib.sha256()
    # Other files in the folder are not read by a run; caches of libraries may add some at any time.
    for path in sorted(path for path in folder.iterdir() if path.is_file() and any(map(path.match, MODEL_FILES))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for position in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                file.seek(position)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def write_records(run: RunFolder, records: Iterable[Provenance]) -> None:
    """Write what the run consists of into its folder.

    Raises:
        DiskError: the disk refuses.
    """
    with writing("the run folder", run.path):
        replace_durably(run.plugins, json.dumps([record.as_dict() for record in records], indent=1).encode())


def saved_records(run: RunFolder) -> list[Provenance]:
    """Return what a run consisted of when it was started or last resumed.

    Raises:
        UsageError: the run was never started, or the file is damaged.
    """
    if not run.plugins.is_file():
        raise UsageError(f"{run.path} was never started: it has no plugins.json", hints=["start it with: areal run"])
    try:
        return [Provenance(**record) for record in json.loads(run.plugins.read_text())]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{run.plugins} is damaged: {error}; write [] into it, and add --allow-changes") from None


def check_unchanged(run: RunFolder, records: Sequence[Provenance], *, allowed: bool) -> None:
    """Compare a run that is resumed with its saved records.

    Args:
        run: the run's folder.
        records: what the run would consist of now.
        allowed: whether the user allows changes.

    Raises:
        UsageError: something has changed, and changes are not allowed.
    """
    saved = saved_records(run)
    parts = [record for record in saved if record.name != run.config.name]
    changes = [*compare(parts, records), *changed_copies(run, saved)]
    if changes and not allowed:
        raise UsageError(
            f"{len(changes)} thing(s) have changed since the run in {run.path} was started: {'; '.join(changes)}",
            hints=["resume anyway with --allow-changes, or restore the former state"],
        )


def compare(saved: Iterable[Provenance], current: Iterable[Provenance]) -> list[str]:
    """Return the differences between the records of a saved run and current ones, one line each.

    If several records have the same name, the last one counts.
    """
    before, after = ({record.name: record for record in records} for records in (saved, current))
    lines = [
        f"{name}: was not part of the saved run" for name, new in after.items() if name not in before and not new.is_own
    ]
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            lines.append(f"{name}: {_title(old)} was part of the saved run and is not loaded now")
        elif (old.distribution, old.version) != (new.distribution, new.version):
            lines.append(f"{name}: was {_title(old)}, is now {_title(new)}")
        elif old.source_hash != new.source_hash:
            lines.append(f"{name}: the content of {_title(new)} has changed since the run was saved")
    return lines


def _title(record: Provenance) -> str:
    return f"{record.distribution} {record.version}".strip() or "what it names"


def changed_copies(run: RunFolder, saved: Iterable[Provenance]) -> Iterator[str]:
    """Yield files in the run folder that the run did not write in this form: its config, and its copies of sources.

    A resume that was killed while it wrote leaves several records of one name; see `write_run_folder`. Each counts.
    """
    hashes_by_file: dict[Path, set[str | None]] = {}
    for record in saved:
        is_config = record.name == run.config.name
        file = run.config if is_config else KeptSources.place(run.sources, Path(record.location), record.name)
        hashes_by_file.setdefault(file, set()).add(record.source_hash)
    for file, hashes in hashes_by_file.items():
        if file.is_file() and _hash(file) not in hashes:
            yield f"{file}: was written by the run and has been changed since"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
