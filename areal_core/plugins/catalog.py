"""The installed plugins: the entry points of the group `areal.plugins`, read from metadata without importing anything.

This module also compares the versions of areal-core that a plugin declares with the one that is running.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
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
"""The plugin name of the core's own components. It is always loaded."""
CORE_DISTRIBUTION: Final = "areal-core"

_BACKENDS: Final = ("hf", "fsdp", "deepspeed", "sglang", "vllm", "ray", "slurm", "nodes", "sandboxes")
_IDEAS: Final = (
    "grpo",
    "finetuning",
    "rewards",
    "agents",
    "vision",
    "trackers",
    "evaluation",
    "view",
    "convert",
    "tinker",
)
FIRST_PARTY: Final = (*_BACKENDS, *_IDEAS)
"""Plugins of this project. areal proposes only `areal-<one of these>` for installation: any other name on a public
index may belong to a stranger."""
TESTING: Final = "testing"
"""`areal-testing`, a distribution of this project that is no plugin: a new plugin must not take its name."""
SUPPLIERS: Final = {("launchers", "external"): "nodes", ("commands", "node"): "nodes"}
"""Components of this project whose name differs from their plugin's: kind and name, and the plugin. A bare name in a
config loads the plugin. If it is missing, the error proposes to install it."""


def is_from_index() -> bool:
    """Return whether the core was installed from a package index: pip records every other source (PEP 610)."""
    return (core := Installed.core().metadata) is not None and core.read_text("direct_url.json") is None


def install_command(*names: str, extra: str = "") -> str:
    """Return the pip command that installs plugins of this project from where the core was installed.

    In a clone, the command installs the clone's plugins: a name that is not on the index yet may become a stranger's.

    Args:
        names: of the plugins, without `areal-`.
        extra: of each of them; empty for none. For an example see `extra_module`.
    """
    prefix, note = ("areal-", "") if is_from_index() else ("./plugins/areal_", " (in a clone of areal)")
    requirements = " ".join(f"'{prefix}{name}[{extra}]'" if extra else f"{prefix}{name}" for name in names)
    return f"pip install {requirements}{note}"


def extra_module(module: str, plugin: str, extra: str) -> Any:
    """Import and return a module that an extra of a plugin of this project installs.

    Args:
        module: the full name, such as `areal_vision.images`.
        plugin: name of the plugin, without `areal-`.
        extra: name of its extra that installs the module.

    Raises:
        RunError: the module is not installed. The hint is the command that installs it.

    Example:
        >>> from areal_core.errors import RunError
        >>> from areal_core.plugins import extra_module, install_command
        >>> try:
        ...     extra_module("no_such_library", "hf", "vision")
        ... except RunError as error:
        ...     print(error.message)
        ...     print(error.hints == (install_command("hf", extra="vision"),))
        no_such_library is needed here, and is not installed
        True
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"{error.name} is needed here, and is not installed"
        raise RunError(message, hints=[install_command(plugin, extra=extra)]) from error


@dataclass(frozen=True)
class Installed:
    """An entry point with the metadata of its distribution.

    Attributes:
        name: of the plugin.
        distribution: name of the distribution.
        version: of the distribution.
        entry_point: names the plugin's module.
        metadata: of the distribution; None if the core runs from a folder that is not installed.
    """

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint = field(compare=False, repr=False)
    metadata: importlib.metadata.Distribution | None = field(compare=False, repr=False)

    @classmethod
    def core(cls) -> Installed:
        """Return the entry of the core, whose components are registered like those of any plugin."""
        metadata = next(iter(importlib.metadata.distributions(name=CORE_DISTRIBUTION)), None)
        point = importlib.metadata.EntryPoint(CORE, "areal_core.plugins.builtin", GROUP)
        return cls(CORE, CORE_DISTRIBUTION, areal_core.__version__, point, metadata)

    @property
    def title(self) -> str:
        """Plugin, distribution and version, as errors name them."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"

    def required(self, extra: str = "") -> dict[str, SpecifierSet]:
        """Return the distributions that this one requires, with their versions.

        Args:
            extra: also include what this extra requires; empty for none.
        """
        required: dict[str, SpecifierSet] = {}
        for line in (self.metadata and self.metadata.requires) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                name = canonicalize_name(requirement.name)
                required[name] = required.get(name, SpecifierSet()) & requirement.specifier
        return required

    def repair(self, missing_module: str) -> str:
        """Return the pip command that installs a missing module, with the extra that declares it if there is one."""
        library, always = canonicalize_name(missing_module), self.required().keys()
        names = self._fields("Provides-Extra")
        extra = next((name for name in names if library in self.required(name).keys() - always), "")
        if self.name in FIRST_PARTY and self.distribution == f"areal-{self.name}":
            return install_command(self.name, extra=extra)
        return f"pip install '{self.distribution}[{extra}]'" if extra else f"pip install --upgrade {self.distribution}"

    def unmet(self) -> list[str]:
        """Return what it requires besides the core and what is missing or has a wrong version, each with the repair."""
        unmet = []
        for name, versions in self.required().items():
            found = next((each.version for each in importlib.metadata.distributions(name=name)), "")
            if name != CORE_DISTRIBUTION and not (found and versions.contains(found, prereleases=True)):
                has = f"{found} is installed" if found else "it is not installed"
                unmet.append(f"{self.title} requires {name}{versions}, and {has}: pip install '{name}{versions}'")
        return unmet

    def report_address(self) -> str:
        """Return where to report a mistake in the plugin: the first project address in its metadata."""
        address = next(iter(self._fields("Project-URL")), f"the authors of {self.distribution}")
        return address.partition(",")[2].strip() or address

    def check_range(self) -> None:
        """Raise `PluginIncompatibleError` if the plugin does not declare that it works with the running core."""
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
        """Return every value of a key of the metadata that may occur several times."""
        return (self.metadata.metadata.get_all(key) if self.metadata else None) or []


class Catalog:
    """The installed plugins by name. Reading it imports none of them.

    Attributes:
        entries: every entry point, including those that claim the same name.
    """

    def __init__(self, installed: Iterable[Installed]) -> None:
        self.entries = sorted(installed, key=lambda entry: (entry.name, entry.distribution))

    @classmethod
    def scan(cls) -> Catalog:
        """Return the catalog of the distributions on the path.

        Their metadata is read once, and again if the path or a folder on it changes: an installation adds to a folder.
        """
        return _scan(tuple((folder, _modified_at(folder)) for folder in sys.path))

    def names(self) -> list[str]:
        """Return the names of the installed plugins, sorted."""
        return sorted({entry.name for entry in self.entries})

    def get(self, name: str) -> Installed | None:
        """Return the plugin of this name, or None. Raises `PluginConflictError` if two distributions claim it."""
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
        """Return one error for all plugins that are not installed, with one pip command. Its parts have one for each.

        Args:
            names: of the plugins.
            asked_by: end of the error's sentence: what asks for them.
        """
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
        parts = [self.missing([name], asked_by) for name in names] if len(names) > 1 else []
        return PluginMissingError(f"{subject} installed{asked_by}", hints=hints, parts=parts, names=names)


def _modified_at(folder: str) -> int:
    """Return when a folder last changed, in nanoseconds; 0 if it does not exist."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _scan(path: tuple[tuple[str, int], ...]) -> Catalog:
    """Read the metadata of every distribution. `path` is the state of `sys.path`, for the cache."""
    del path
    return Catalog(
        Installed(normalize(point.name), point.dist.metadata["Name"], point.dist.version, point, point.dist)
        for point in importlib.metadata.entry_points(group=GROUP)
        if point.dist is not None
    )
