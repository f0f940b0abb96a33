"""What is installed: the entry points of group `areal.plugins`, read from metadata without importing anything.

Also here: the comparison of a plugin's declared range on areal-core with the core that is running, because both need
nothing but the metadata.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import areal_core
from areal_core.errors import PluginConflictError, PluginIncompatibleError, PluginMissingError
from areal_core.plugins.markers import GROUP
from areal_core.plugins.records import normalise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CORE: Final = "core"
"""The name under which the core's own components are registered; always loaded."""
CORE_DISTRIBUTION: Final = "areal-core"

FIRST_PARTY: Final = (
    "hf",
    "fsdp",
    "deepspeed",
    "grpo",
    "preferences",
    "rewards",
    "agents",
    "environments",
    "trackers",
    "servers",
    "sglang",
    "vllm",
    "ray",
    "slurm",
    "view",
)
"""Plugins of this project. Only `areal-<one of these>` is ever proposed for installation: a guessed name on a public
index may belong to anybody."""


@dataclass(frozen=True)
class Installed:
    """One entry point, with what its distribution's metadata says."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint = field(compare=False, repr=False)
    metadata: importlib.metadata.Distribution = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        """Who this is, in the words of every error."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"

    def requirements(self) -> list[Requirement]:
        """What the distribution requires; lines that do not follow the standard are left out."""
        found = []
        for line in self.metadata.requires or ():
            try:
                found.append(Requirement(line))
            except InvalidRequirement:
                continue
        return found

    def repair(self, missing_module: str) -> str:
        """The pip line that brings `missing_module`: with the extra that declares it, where there is one."""
        wanted = canonicalize_name(missing_module)
        for requirement in self.requirements():
            if canonicalize_name(requirement.name) != wanted or requirement.marker is None:
                continue
            for extra in self.metadata.metadata.get_all("Provides-Extra") or ():
                if requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""}):
                    return f"pip install '{self.distribution}[{extra}]'"
        return f"pip install --upgrade {self.distribution}"

    def report_address(self) -> str:
        """Where a mistake in the plugin is reported: the first project address in its metadata."""
        for line in self.metadata.metadata.get_all("Project-URL") or ():
            return line.partition(",")[2].strip() or line
        return f"the authors of {self.distribution}"

    def check_range(self) -> None:
        """Raise `PluginIncompatibleError` unless the declared range on areal-core contains the running core."""
        ranges = [
            requirement.specifier
            for requirement in self.requirements()
            if canonicalize_name(requirement.name) == CORE_DISTRIBUTION
            and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        ]
        core = Version(Version(areal_core.__version__).base_version)
        if not any(ranges):
            raise PluginIncompatibleError(
                f"{self.title} does not declare which versions of areal-core it works with",
                hints=(
                    f'add to the dependencies of {self.distribution}: "areal-core>={core.major}.{core.minor},'
                    f'<{core.major}.{core.minor + 1}"',
                    f"areal-core {areal_core.__version__} is installed",
                ),
            )
        refused = [specifier for specifier in ranges if not specifier.contains(core, prereleases=True)]
        if refused:
            raise PluginIncompatibleError(
                f"{self.title} needs areal-core{refused[0]} but {areal_core.__version__} is installed",
                hints=(
                    f"upgrade it with: pip install --upgrade {self.distribution}",
                    f"or leave it out with: --plugins no:{self.name}",
                ),
            )


class Catalog:
    """The plugins that are installed, by name. Reading it imports none of them."""

    def __init__(self, installed: Iterable[Installed]) -> None:
        self._by_name: dict[str, list[Installed]] = {}
        for entry in installed:
            self._by_name.setdefault(entry.name, []).append(entry)

    @classmethod
    def scan(cls) -> Catalog:
        """Read the metadata of every distribution on the path."""
        found = []
        for point in importlib.metadata.entry_points(group=GROUP):
            if point.dist is not None:
                name, version = point.dist.metadata["Name"], point.dist.version
                found.append(Installed(normalise(point.name), name, version, point, point.dist))
        return cls(sorted(found, key=lambda entry: (entry.name, entry.distribution)))

    def names(self) -> list[str]:
        """Every installed plugin's name, sorted."""
        return sorted(self._by_name)

    def entries(self) -> list[Installed]:
        """Every entry point, those that claim the same name included."""
        return [entry for name in self.names() for entry in self._by_name[name]]

    def get(self, name: str) -> Installed | None:
        """The plugin of this name, or None; `PluginConflictError` if two distributions claim it."""
        entries = self._by_name.get(name, [])
        if len(entries) > 1 or (entries and name == CORE):
            owners = [f"{entry.distribution} {entry.version}" for entry in entries]
            if name == CORE:
                owners.append("areal-core itself")
            raise PluginConflictError(
                f"the plugin name '{name}' is claimed by {' and by '.join(owners)}",
                hints=(f"remove one of them, for example: pip uninstall {entries[-1].distribution}",),
            )
        return entries[0] if entries else None

    def missing(self, names: Sequence[str], asked_by: str = "") -> PluginMissingError:
        """The error for plugins that are not installed: all of them at once, with one pip line."""
        known = [name for name in names if name in FIRST_PARTY]
        hints = []
        if known:
            hints.append(f"install {'it' if len(names) == 1 else 'them'} with: pip install {_distributions(known)}")
        for name in names:
            if name not in FIRST_PARTY:
                near = difflib.get_close_matches(name, {*self.names(), *FIRST_PARTY}, n=1)
                question = f"; did you mean '{near[0]}'?" if near else ""
                hints.append(f"'{name}' is no plugin of this project: install its distribution by its name{question}")
        hints.append(f"installed plugins: {', '.join(self.names()) or 'none besides the core'}")
        quoted = ", ".join(f"'{name}'" for name in names)
        subject = f"no plugin named {quoted} is" if len(names) == 1 else f"no plugins named {quoted} are"
        return PluginMissingError(f"{subject} installed{asked_by}", hints=hints, names=names)


def _distributions(names: Iterable[str]) -> str:
    return " ".join(f"areal-{name}" for name in names)
