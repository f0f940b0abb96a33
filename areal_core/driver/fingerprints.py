"""Fingerprints of what a resume rests on beside its checkpoint: modules of the user's own, data and models."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.disk import is_folder, replace_durably, writing
from areal_core.errors import UsageError
from areal_core.files import PREFIX, KeptSources
from areal_core.plugins import Provenance, compare
from areal_core.runs.models import MODEL_FILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from areal_core.config import Resolved
    from areal_core.interfaces.dataset import Dataset
    from areal_core.runtime.folder import RunFolder

MOST_ROWS = 1000
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Of each file of a model; a small one is read whole."""


def data_record(key: str, reference: str, dataset: Dataset) -> Provenance:
    """The record of a data set: its length, and its own `fingerprint`, or one of rows evenly spread over it, in which
    values that are no JSON count by their type alone."""
    length, digest, own = len(dataset), hashlib.sha256(), getattr(dataset, "fingerprint", None)
    count = 0 if callable(own) else min(length, MOST_ROWS)
    for place in range(count):
        row = dataset[place * (length - 1) // max(1, count - 1)]
        try:
            text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        except (TypeError, ValueError):  # keys that are no text
            text = ", ".join(map(str, row))
        digest.update(text.encode())
    return Provenance(key, "", f"{length} rows", reference, str(own()) if callable(own) else digest.hexdigest())


def module_records(modules: Mapping[str, str]) -> Iterator[Provenance]:
    """Yield the records of modules, by name and file. A file beside a component's is named as that is, by its path."""
    for name, path in sorted(modules.items()):
        yield Provenance(path if name.startswith(PREFIX) else f"module {name}", "", "", path, _hash(Path(path)))


def model_records(run: RunFolder, named: Mapping[str, Path]) -> Iterator[Provenance]:
    """The records of models by the key and the folder of each: that which a source has made for the run, and others."""
    made = {"model.path": Path(run.model_note.read_text())} if run.model_note.is_file() else {}
    for key, folder in {**made, **named}.items():
        if is_folder(folder):
            yield Provenance(key, "", "", str(folder), _hash_model(folder))


def _hash_model(folder: Path) -> str:
    digest = hashlib.sha256()
    # What else a cache comes to hold is nothing that a run reads.
    for path in sorted(path for path in folder.iterdir() if path.is_file() and any(map(path.match, MODEL_FILES))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def imported_modules(resolved: Resolved) -> dict[str, str]:
    """The modules of this process that come from no plugin, no installed package and not with Python: name and file."""
    installed = [sysconfig.get_path("stdlib"), *(record.location for record in resolved.plugins.provenance())]
    found = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if not path.is_file() or name == "__main__" or str(path) in resolved.files:
            continue
        if not {"site-packages", "dist-packages"} & {*path.parts} and not any(map(path.is_relative_to, installed)):
            found[name] = str(path)
    return found


def write_provenance(run: RunFolder, records: Iterable[Provenance]) -> None:
    """Write what the run is made of into its folder.

    Raises:
        DiskError: the disk refuses.
    """
    with writing("the run folder", run.path):
        replace_durably(run.plugins, json.dumps([record.as_dict() for record in records], indent=1).encode())


def check_unchanged(run: RunFolder, now: Sequence[Provenance], *, allowed: bool) -> None:
    """Raise `UsageError` where a run that is resumed is made of something else than it was started with.

    Args:
        run: the folder.
        now: what it would be made of.
        allowed: the user knows.
    """
    saved = saved_records(run)
    parts = [record for record in saved if record.name != run.config.name]
    changes = [*compare(parts, now), *changed_copies(run, saved)]
    if changes and not allowed:
        raise UsageError(
            f"{len(changes)} thing(s) have changed since the run in {run.path} was started: {'; '.join(changes)}",
            hints=["to go on with what there is now, add --allow-changes; else bring the former state back"],
        )


def saved_records(run: RunFolder) -> list[Provenance]:
    """What a run was made of when it was started, or resumed last."""
    if not run.plugins.is_file():
        raise UsageError(f"{run.path} was never started: it has no plugins.json", hints=["start it with: areal run"])
    try:
        return [Provenance(**record) for record in json.loads(run.plugins.read_text())]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{run.plugins} is damaged: {error}; write [] into it, and add --allow-changes") from None


def changed_copies(run: RunFolder, saved: Iterable[Provenance]) -> Iterator[str]:
    """What is no more as the run wrote it into its folder: its config, and the sources that it keeps. Several records
    of one name are of a resume that was killed while it wrote; see `write_run_folder`."""
    written: dict[Path, set[str | None]] = {}
    for record in saved:
        kept = KeptSources.place(run.sources, Path(record.location), record.name)
        kept = run.config if record.name == run.config.name else kept
        written.setdefault(kept, set()).add(record.source_hash)
    for kept, hashes in written.items():
        if kept.is_file() and _hash(kept) not in hashes:
            yield f"{kept}: was written by the run, and is another one now"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
