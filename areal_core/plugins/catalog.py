"""What is installed: the entry points of group `areal.plugins`, read from metadata without importing anything.

Also here: the comparison of a plugin's declared range on areal-core with the core that is running, because both need
nothing but the metadata.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import areal_core
from areal_core.errors import PluginConflictError, PluginIncompatibleError, PluginMissingError, RunError
from areal_core.plugins.markers import GROUP
from areal_core.plugins.records import normalize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CORE: Final = "core"
"""The name under which the core's own components are registered; always loaded."""
CORE_DISTRIBUTION: Final = "areal-core"

_BACKENDS: Final = ("hf", "fsdp", "deepspeed", "sglang", "vllm", "ray", "slurm", "nodes", "sandboxes")
_IDEAS: Final = ("grpo", "finetuning", "rewards", "agents", "vision", "trackers", "evaluation", "view", "convert")
FIRST_PARTY: Final = (*_BACKENDS, *_IDEAS)
"""Plugins of this project. Only `areal-<one of these>` is ever proposed for installation: a guessed name on a public
index may belong to anybody."""
SUPPLIERS: Final = {("launchers", "external"): "nodes", ("commands", "node"): "nodes"}
"""Plugins of this project that supply something under another name than their own, by its kind and name. A bare name in
a config loads the plugin; if the plugin is missing, the error proposes to install it."""


def is_from_index() -> bool:
    """Whether the core came from a package index: pip notes any other source of a distribution (PEP 610)."""
    return (core := Installed.core().metadata) is not None and core.read_text("direct_url.json") is None


def install_command(*names: str, extra: str = "") -> str:
    """What installs plugins of this project, with an extra or without, from where the core came.

    Whoever works in a clone gets the clone's: a name that is not on the index yet may become somebody else's.
    """
    place, note = ("areal-", "") if is_from_index() else ("./plugins/areal_", " (in a clone of areal)")
    words = " ".join(f"'{place}{name}[{extra}]'" if extra else f"{place}{name}" for name in names)
    return f"pip install {words}{note}"


def extra_module(module: str, plugin: str, extra: str) -> Any:
    """A module that comes with an extra of a plugin of this project, imported where it is needed.

    Raises:
        RunError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        words = f"{error.name} is needed here, and is not installed"
        raise RunError(words, hints=[install_command(plugin, extra=extra)]) from error


@dataclass(frozen=True)
class Installed:
    """One entry point, with what its distribution's metadata says (nothing, where the core runs from a bare folder)."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint = field(compare=False, repr=False)
    metadata: importlib.metadata.Distribution | None = field(compare=False, repr=False)

    @classmethod
    def core(cls) -> Installed:
        """The core itself, whose own components come through the same path as everybody else's."""
        metadata = next(iter(importlib.metadata.distributions(name=CORE_DISTRIBUTION)), None)
        point = importlib.metadata.EntryPoint(CORE, "areal_core.plugins.builtin", GROUP)
        return cls(CORE, CORE_DISTRIBUTION, areal_core.__version__, point, metadata)

    @property
    def title(self) -> str:
        """Who this is, in the words of every error."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"

    def required(self, extra: str = "") -> dict[str, SpecifierSet]:
        """The distributions, and their versions, that this one requires, with an extra or without."""
        required: dict[str, SpecifierSet] = {}
        for line in (self.metadata and self.metadata.requires) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                name = canonicalize_name(requirement.name)
                required[name] = required.get(name, SpecifierSet()) & requirement.specifier
        return required

    def repair(self, missing_module: str) -> str:
        """The pip line that brings `missing_module`: with the extra that declares it, where there is one."""
        wanted, always = canonicalize_name(missing_module), self.required().keys()
        names = self._fields("Provides-Extra")
        extra = next((one for one in names if wanted in self.required(one).keys() - always), "")
        if self.name in FIRST_PARTY and self.distribution == f"areal-{self.name}":
            return install_command(self.name, extra=extra)
        return f"pip install '{self.distribution}[{extra}]'" if extra else f"pip install --upgrade {self.distribution}"

    def unmet(self) -> list[str]:
        """What it requires, beside the core, that is not installed or in another version; each with the repair."""
        unmet = []
        for name, versions in self.required().items():
            found = next((each.version for each in importlib.metadata.distributions(name=name)), "")
            if name != CORE_DISTRIBUTION and not (found and versions.contains(found, prereleases=True)):
                has = f"{found} is installed" if found else "it is not installed"
                unmet.append(f"{self.title} requires {name}{versions}, and {has}: pip install '{name}{versions}'")
        return unmet

    def report_address(self) -> str:
        """Where a mistake in the plugin is reported: the first project address in its metadata."""
        address = next(iter(self._fields("Project-URL")), f"the authors of {self.distribution}")
        return address.partition(",")[2].strip() or address

    def check_range(self) -> None:
        """Raise `PluginIncompatibleError` unless the declared range on areal-core contains the running core."""
        versions = self.required().get(CORE_DISTRIBUTION)
        core = Version(Version(areal_core.__version__).base_version)
        if not versions:
            raise PluginIncompatibleError(
                f"{self.title} does not declare which versions of areal-core it works with",
                hints=(
                    f'add to the dependencies of {self.distribution}: "areal-core>={core.major}.{core.minor},'
                    f'<{core.major}.{core.minor + 1}"',
                    f"areal-core {areal_core.__version__} is installed",
                ),
            )
        if not versions.contains(core, prereleases=True):
            lowest = [bound.version for bound in versions if bound.operator not in {"<", "<=", "!="}]
            is_core_old = any(Version(version.removesuffix(".*")) > core for version in lowest)
            behind = f"'{CORE_DISTRIBUTION}{versions}'" if is_core_old else self.distribution
            raise PluginIncompatibleError(
                f"{self.title} needs areal-core{versions} but {areal_core.__version__} is installed",
                hints=(f"upgrade {'the core' if is_core_old else 'it'} with: pip install --upgrade {behind}",),
            )

    def _fields(self, key: str) -> list[str]:
        """Every value of a key that the metadata may hold several times."""
        return (self.metadata.metadata.get_all(key) if self.metadata else None) or []


class Catalog:
    """The plugins that are installed, by name. Reading it imports none of them."""

    def __init__(self, installed: Iterable[Installed]) -> None:
        self.entries = sorted(installed, key=lambda entry: (entry.name, entry.distribution))
        """Every entry point, those that claim the same name included."""

    @classmethod
    def scan(cls) -> Catalog:
        """Read the metadata of every distribution on the path."""
        return cls(
            Installed(normalize(point.name), point.dist.metadata["Name"], point.dist.version, point, point.dist)
            for point in importlib.metadata.entry_points(group=GROUP)
            if point.dist is not None
        )

    def names(self) -> list[str]:
        """Every installed plugin's name, sorted."""
        return sorted({entry.name for entry in self.entries})

    def get(self, name: str) -> Installed | None:
        """The plugin of this name, or None; `PluginConflictError` if two distributions claim it."""
        entries = [entry for entry in self.entries if entry.name == name]
        owners = [f"{entry.distribution} {entry.version}" for entry in entries]
        if name == CORE:
            entries, owners = [Installed.core(), *entries], [*owners, "areal-core itself"]
        if len(entries) > 1:
            raise PluginConflictError(
                f"the plugin name '{name}' is claimed by {' and by '.join(owners)}",
                hints=(f"remove one of them, for example: pip uninstall {entries[-1].distribution}",),
            )
        return next(iter(entries), None)

    def missing(self, names: Sequence[str], asked_by: str = "") -> PluginMissingError:
        """The error for plugins that are not installed: all of them at once, with one pip line."""
        known = [name for name in names if name in FIRST_PARTY]
        hints = []
        if known:
            hints.append(f"install {'it' if len(names) == 1 else 'them'} with: {install_command(*known)}")
        for name in names:
            if name not in FIRST_PARTY:
                near = difflib.get_close_matches(name, {*self.names(), *FIRST_PARTY}, n=1)
                question = f"; did you mean '{near[0]}'?" if near else ""
                hints.append(f"'{name}' is not a plugin of areal: install its distribution by name{question}")
        hints.append(f"installed plugins: {', '.join(self.names()) or 'none besides the core'}")
        quoted = ", ".join(f"'{name}'" for name in names)
        subject = f"no plugin named {quoted} is" if len(names) == 1 else f"no plugins named {quoted} are"
        return PluginMissingError(f"{subject} installed{asked_by}", hints=hints, names=names)
