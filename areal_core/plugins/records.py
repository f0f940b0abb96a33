"""The records that registration hooks return: strings that say what a plugin supplies and where it lies.

Records name their code as "module:attribute" and never hold it, so that listing every plugin on a machine imports no
engine and no torch. The plugin manager checks each record and stamps it with where it came from, so that every later
error can name the plugin, its distribution and its version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"), "package.module:attribute"
_RESOURCE: Final = re.compile(r"[A-Za-z_][\w.]*:[\w./-]+\.ya?ml"), "package.module:file.yaml"

KINDS: Final[Mapping[str, str]] = {
    "train_engines": "training engine",
    "inference_engines": "inference engine",
    "workflows": "workflow",
    "environments": "environment",
    "agents": "agent",
    "tools": "tool",
    "sandboxes": "sandbox",
    "reward_functions": "reward function",
    "datasets": "data set",
    "algorithms": "algorithm",
    "reward_shaping": "reward shaping",
    "group_filters": "group filter",
    "batch_transforms": "batch transform",
    "advantages": "advantage",
    "policy_losses": "policy loss",
    "corrections": "correction",
    "regularizers": "regularizer",
    "auxiliary_losses": "auxiliary loss",
    "loss_aggregations": "loss aggregation",
    "example_tokenizers": "example tokenizer",
    "models": "model",
    "weight_transports": "weight transport",
    "launchers": "launcher",
    "trackers": "tracker",
    "presets": "preset",
    "commands": "command",
    "health_checks": "health check",
}
"""Every kind of thing a plugin may supply, and what one of it is called; the hook of a kind is `areal_<kind>`."""


@dataclass(frozen=True)
class Record:
    """What every record has; `plugin`, `distribution` and `version` are stamped on by the manager."""

    LOCATIONS: ClassVar[Mapping[str, tuple[re.Pattern[str], str]]] = {}
    """The fields that name code or files, each with the pattern that it follows and that pattern in words."""

    name: str
    summary: str
    plugin: str = field(default="", kw_only=True)
    distribution: str = field(default="", kw_only=True)
    version: str = field(default="", kw_only=True)

    @property
    def reference(self) -> str:
        """The unmistakable name, as it may stand in a config: `plugin/name`."""
        return f"{self.plugin}/{self.name}"

    @property
    def supplier(self) -> str:
        """Who supplied this, in the words of every error: plugin, distribution and version."""
        return f"plugin {self.plugin} ({self.distribution} {self.version})"

    def faults(self) -> list[str]:
        """What is wrong with the record itself; the manager refuses the plugin and prints all of it."""
        faults = []
        if not NAME.fullmatch(self.name):
            faults.append(f"the name {self.name!r} is not of the form [a-z][a-z0-9_]*")
        if not self.summary.strip():
            faults.append(f"{self.name!r} has no summary; add one line that says what it is for")
        for key, (pattern, form) in self.LOCATIONS.items():
            location = getattr(self, key)
            if location is not None and not pattern.fullmatch(location):
                faults.append(f'{key} of {self.name!r} is {location!r}; write it "{form}"')
        return faults


@dataclass(frozen=True)
class Component(Record):
    """A part that a config can choose with `type:`, of any of the kinds up to `trackers`.

    `target` is the class or function. `config` is its `Settings` model; without one the component takes no settings.
    Importing the module of `config` must not import torch: configs are checked on machines that have none.
    """

    LOCATIONS: ClassVar = {"target": _CODE, "config": _CODE}

    target: str
    config: str | None = None


@dataclass(frozen=True)
class Preset(Record):
    """A complete config that ships inside a plugin, with the plugins it needs.

    `path` is "package.module:file.yaml", the file lying beside that module (or in that package). `default` marks the
    preset that `areal run --plugins NAME` runs when no config is named; a plugin has at most one.
    """

    LOCATIONS: ClassVar = {"path": _RESOURCE}

    path: str
    plugins: tuple[str, ...] = ()
    default: bool = False


@dataclass(frozen=True)
class Command(Record):
    """`areal PLUGIN COMMAND ...`: `target` is called with the remaining words and returns the exit code. One that is
    named as its plugin is `areal PLUGIN ...`."""

    LOCATIONS: ClassVar = {"target": _CODE}

    target: str


class Finding(NamedTuple):
    """What a health check has found: whether all is well, or None where it could not find out, and in one line what
    there is, or what is wrong."""

    is_well: bool | None
    text: str


@dataclass(frozen=True)
class HealthCheck(Command):
    """A question about the machine, asked by `areal doctor` in a process of its own.

    `target()` returns None when all is well, one line that says what is wrong, or a `Finding`. With `of_model` it is a
    question about a model instead: `areal doctor MODEL` asks it, as `target(folder)`. The folder has at least the
    model's config.json and tokenizer; the weights of a model on the hub are not there.
    """

    of_model: bool = False


RECORD_TYPES: Final[Mapping[str, type[Record]]] = {
    kind: {"presets": Preset, "commands": Command, "health_checks": HealthCheck}.get(kind, Component) for kind in KINDS
}


def normalize(name: str) -> str:
    """A plugin or component name as it is compared: `-` is read as `_`."""
    return name.strip().replace("-", "_")


def with_article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
