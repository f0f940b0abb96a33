"""Provenance: what a run consists of. The run folder records it; a resume and an audit compare it."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.plugins.catalog import Installed


@dataclass(frozen=True)
class Provenance:
    """The record of a plugin, of one of the user's files or modules, of a data set or of a model.

    Attributes:
        name: of what is recorded.
        distribution: of a plugin; empty for everything else.
        version: of a plugin; of a data set, its length.
        location: its path. It is never compared, because other machines have other paths.
        source_hash: SHA-256 over a plugin's Python and YAML files, or of a file. The version alone does not identify
            the content of an editable installation.
    """

    name: str
    distribution: str
    version: str
    location: str
    source_hash: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's, and no plugin."""
        return not self.distribution

    def as_dict(self) -> dict[str, str | None]:
        """Return the record as JSON can hold it."""
        return asdict(self)


def describe(installed: Installed) -> Provenance:
    """Return the provenance of a loaded plugin, or of the core."""
    specification = importlib.util.find_spec(installed.entry_point.module.partition(".")[0])
    origin = Path(specification.origin) if specification and specification.origin else Path("nowhere")
    folder = origin.parent
    is_package = specification is None or specification.submodule_search_locations
    source_hash = _hash(folder.rglob("*") if is_package else [origin], folder)
    return Provenance(installed.name, installed.distribution, installed.version, str(folder), source_hash)


def _hash(paths: Iterable[Path], base: Path) -> str:
    """Return one hash over the Python and YAML files among `paths`: over their paths below `base` and their content."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in {".py", ".yaml", ".yml"} and path.is_file()):
        digest.update(path.relative_to(base).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compare(saved: Iterable[Provenance], now: Iterable[Provenance]) -> list[str]:
    """Return the differences between a saved run and now, one line each; an empty list if they agree.

    Args:
        saved: records of the run folder. Of several records of one name the last counts.
        now: records of what is loaded now.
    """
    before, after = ({record.name: record for record in records} for records in (saved, now))
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
