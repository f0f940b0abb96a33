"""What a run is made of: recorded in its folder, compared when it is resumed or audited."""

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
    """A plugin, a file or module of the user's own, a data set or a model of a run.

    `source_hash` covers a plugin's Python and YAML files: of an editable installation, or one that was made again and
    again while its author works, the version says nothing about the content. Of a data set `version` is its length.
    `location` is recorded and never compared: another machine has other paths.
    """

    name: str
    distribution: str
    version: str
    location: str
    source_hash: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own, and no plugin."""
        return not self.distribution

    def as_dict(self) -> dict[str, str | None]:
        """The record as JSON holds it."""
        return asdict(self)


def describe(installed: Installed) -> Provenance:
    """The provenance of a loaded plugin, or of the core itself."""
    specification = importlib.util.find_spec(installed.entry_point.module.partition(".")[0])
    origin = Path(specification.origin) if specification and specification.origin else Path("nowhere")
    folder = origin.parent
    is_package = specification is None or specification.submodule_search_locations
    source_hash = _hash(folder.rglob("*") if is_package else [origin], folder)
    return Provenance(installed.name, installed.distribution, installed.version, str(folder), source_hash)


def _hash(paths: Iterable[Path], base: Path) -> str:
    """One hash over the Python and YAML files among `paths`, by their place below `base` and their content."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in {".py", ".yaml", ".yml"} and path.is_file()):
        digest.update(path.relative_to(base).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compare(saved: Iterable[Provenance], now: Iterable[Provenance]) -> list[str]:
    """What differs between the plugins of a saved run and those loaded now, one line each; nothing if they agree. Of
    several records of one name the last counts."""
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
