"""Which plugins a run is made of: recorded in the run folder and every checkpoint, compared when a run is resumed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import areal_core
from areal_core.plugins.catalog import CORE_DISTRIBUTION, Installed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Provenance:
    """One plugin (or one of the user's own files) of a run.

    `source_hash` covers the Python and YAML files of an editable installation, whose version says nothing about its
    content. `location` is recorded and never compared: another machine has other paths.
    """

    name: str
    distribution: str
    version: str
    location: str
    source_hash: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """The record as JSON holds it."""
        return asdict(self)


def describe(name: str, installed: Installed | None) -> Provenance:
    """The provenance of a loaded plugin; None stands for the core itself."""
    if installed is None:
        folder = Path(areal_core.__file__).parent
        is_source = folder.parent.joinpath("pyproject.toml").is_file()
        source_hash = hash_folder(folder) if is_source else None
        return Provenance(name, CORE_DISTRIBUTION, areal_core.__version__, str(folder), source_hash)
    specification = importlib.util.find_spec(installed.entry_point.module.partition(".")[0])
    origin = specification.origin if specification else None
    folder = Path(origin).parent if origin else Path()
    if specification and origin and not specification.submodule_search_locations:
        source_hash = hash_files([Path(origin)], folder)
    else:
        source_hash = hash_folder(folder)
    editable = _is_editable(installed)
    return Provenance(name, installed.distribution, installed.version, str(folder), source_hash if editable else None)


def hash_folder(folder: Path) -> str:
    """One hash over the Python and YAML files of a package, names and contents."""
    files = [path for path in folder.rglob("*") if path.suffix in {".py", ".yaml", ".yml"} and path.is_file()]
    return hash_files(files, folder)


def hash_files(files: Sequence[Path], base: Path) -> str:
    """One hash over files, by their place below `base` and their content."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(base).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compare(
    saved: Sequence[Provenance | Mapping[str, str | None]], now: Sequence[Provenance | Mapping[str, str | None]]
) -> list[str]:
    """What differs between the plugins of a saved run and those loaded now, one line each; nothing if they agree."""
    before, after = (_by_name(records) for records in (saved, now))
    lines = [f"{name}: was not part of the saved run" for name in after if name not in before]
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            lines.append(f"{name}: {_title(old)} was part of the saved run and is not loaded now")
        elif (old.distribution, old.version) != (new.distribution, new.version):
            lines.append(f"{name}: was {_title(old)}, is now {_title(new)}")
        elif old.source_hash != new.source_hash:
            lines.append(f"{name}: the source of {_title(new)} has changed since the run was saved")
    return lines


def _by_name(records: Sequence[Provenance | Mapping[str, str | None]]) -> dict[str, Provenance]:
    found = {}
    for record in records:
        if not isinstance(record, Provenance):
            texts = {key: record.get(key) or "" for key in ("name", "distribution", "version", "location")}
            record = Provenance(**texts, source_hash=record.get("source_hash"))  # noqa: PLW2901
        found[record.name] = record
    return found


def _title(record: Provenance) -> str:
    return f"{record.distribution} {record.version}".strip() or "the file"


def _is_editable(installed: Installed) -> bool:
    """Whether pip installed the distribution as a pointer to a source folder (PEP 610)."""
    text = installed.metadata.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
