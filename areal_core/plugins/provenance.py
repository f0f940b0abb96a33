"""Records of what a run consists of, and the hash of a plugin. `areal_core.checks.fingerprints` compares records."""

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
    """One part of a run: a plugin, a file or module of the user's own, a data set or a model.

    Attributes:
        name: name of the plugin, path of the file, or config key.
        distribution: distribution of a plugin; empty for the user's own parts.
        version: version of a plugin, or length of a data set.
        location: where it is. It is recorded and never compared, because another machine has other paths.
        source_hash: hash of the content. For a plugin it covers Python and YAML files, because the version of an
            editable installation says nothing about its content.
    """

    name: str
    distribution: str
    version: str
    location: str
    source_hash: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own, and not a plugin."""
        return not self.distribution

    def as_dict(self) -> dict[str, str | None]:
        """Return the record as JSON holds it."""
        return asdict(self)


def describe(installed: Installed) -> Provenance:
    """Return the record of a loaded plugin, or of the core itself."""
    specification = importlib.util.find_spec(installed.entry_point.module.partition(".")[0])
    location, source_hash = "", None
    if specification and specification.submodule_search_locations:  # a namespace package has no file of its own
        folder = Path(next(iter(specification.submodule_search_locations)))
        location, source_hash = str(folder), _hash(folder.rglob("*"), folder)
    elif specification and specification.origin:
        module = Path(specification.origin)
        location, source_hash = str(module.parent), _hash([module], module.parent)
    return Provenance(installed.name, installed.distribution, installed.version, location, source_hash)


def _hash(paths: Iterable[Path], base: Path) -> str:
    """Return one hash of the Python and YAML files among `paths`, by their paths relative to `base` and content."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in {".py", ".yaml", ".yml"} and path.is_file()):
        digest.update(path.relative_to(base).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
