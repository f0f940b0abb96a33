"""The records that registration hooks return: strings that say what a plugin supplies and where its code is.

A record names its code as "module:attribute" and never holds it. Listing every plugin on a machine therefore imports no
engine and no torch. While areal loads a plugin, it checks each record and adds the plugin's name, distribution and
version to it, so that every later error can name them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from areal_core.plugins.markers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"), "package.module:attribute"
_RESOURCE: Final = re.compile(r"[A-Za-z_][\w.]*:[\w./-]+\.ya?ml"), "package.module:file.yaml"


@dataclass(frozen=True)
class Record:
    """The fields that every record has. The records of a kind that a plugin adds may derive from it; see `Kind`.

    Attributes:
        name: of the form `[a-z][a-z0-9_]*`.
        summary: one line that says what it is for.
        plugin: name of the plugin that supplies it. areal sets this and the next two fields.
        distribution: name of the plugin's distribution.
        version: version of that distribution.

    Example:
        >>> from dataclasses import dataclass
        >>> from areal_core.plugins import Kind, Record
        >>> @dataclass(frozen=True)
        ... class Prompt(Record):
        ...     text: str
        >>> PROMPTS = Kind("judge_prompts", "prompt", record=Prompt)
        >>> Prompt("strict", "asks for a proof", "Is each step proved?", plugin="judge").reference
        'judge/strict'
        >>> Prompt("Strict", "", "Is each step proved?").faults()[0]
        "the name 'Strict' is not of the form [a-z][a-z0-9_]*"
    """

    LOCATIONS: ClassVar[Mapping[str, tuple[re.Pattern[str], str]]] = {}
    """The fields that name code or files: the pattern of each, and the pattern in words."""

    name: str
    summary: str
    plugin: str = field(default="", kw_only=True)
    distribution: str = field(default="", kw_only=True)
    version: str = field(default="", kw_only=True)

    @property
    def reference(self) -> str:
        """The full name, which a config may use: `plugin/name`."""
        return f"{self.plugin}/{self.name}"

    @property
    def supplier(self) -> str:
        """Plugin, distribution and version, as errors name them."""
        return f"plugin {self.plugin} ({self.distribution} {self.version})"

    def faults(self) -> list[str]:
        """Return what is wrong with the record. areal refuses a plugin whose records have faults, and prints them."""
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
    """A component that a config chooses with `type:`.

        Component("brevity", "rewards short answers", target="areal_shortest.rewards:brevity")

    `areal_core.plugins.register` makes the record of a function or class that the plugin's module imports anyway.

    Attributes:
        target: the class or function, as "package.module:attribute".
        config: its `Settings` model, written the same way. Importing this module must not import torch: configs are
            checked on machines without it. "areal_core.config:NoSettings" says that there is nothing to set. None if
            the settings are the parameters of the function or class: areal then imports the target before a run to
            check them, in a process of its own.
        is_imported: whether areal has imported the target when it has loaded the plugin. `register` sets it.
    """

    LOCATIONS: ClassVar = {"target": _CODE, "config": _CODE}

    target: str
    config: str | None = None
    is_imported: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Preset(Record):
    """A complete config that ships inside a plugin.

    Attributes:
        path: the file, as "package.module:file.yaml". It lies beside that module, or in that package.
        plugins: names of other plugins that the config needs.
        default: whether `areal run --plugins NAME` runs this preset if no config is named. At most one per plugin.
    """

    LOCATIONS: ClassVar = {"path": _RESOURCE}

    path: str
    plugins: tuple[str, ...] = ()
    default: bool = False


@dataclass(frozen=True)
class Command(Record):
    """A command of the terminal: `areal PLUGIN COMMAND ...`, or `areal PLUGIN ...` if it has the plugin's name.

    Attributes:
        target: a function, as "package.module:attribute". It takes the remaining arguments as a list of strings and
            returns the exit code.
    """

    LOCATIONS: ClassVar = {"target": _CODE}

    target: str


class Finding(NamedTuple):
    """The result of a health check.

    Attributes:
        is_well: True if all is well, False if not, None if the check could not find out.
        text: one line that says what there is, or what is wrong.
    """

    is_well: bool | None
    text: str


@dataclass(frozen=True)
class HealthCheck(Command):
    """A check of the machine or of a model, which `areal doctor` runs in its own process.

    Attributes:
        target: a function, as "package.module:attribute". It returns None if all is well, one line that says what is
            wrong, or a `Finding`.
        of_model: False for a check of the machine, `target()`. True for a check of a model, `target(folder)`, which
            `areal doctor MODEL` runs. The folder has at least the model's config.json and tokenizer. It lacks the
            weights of a model on the hub.
    """

    of_model: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of thing that plugins supply: one hook, one type of record.

        SCHEDULES = Kind("curriculum_schedules", "schedule")

    Attributes:
        name: in the plural, as hooks and `areal plugins` use it. A kind that a plugin adds begins with that plugin's
            name: `curriculum_schedules`.
        noun: what one of it is called in errors.
        record: the type of its records.
        supplied: arguments that areal passes to the class of such a component, besides its settings.
    """

    name: str
    noun: str
    record: type[Record] = Component
    supplied: tuple[str, ...] = ()

    @property
    def hook(self) -> str:
        """The name of the hook that returns its records."""
        return f"{PROJECT}_{self.name}"


KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("train_engines", "training engine"),
        Kind("inference_engines", "inference engine"),
        Kind("workflows", "workflow"),
        Kind("environments", "environment"),
        Kind("agents", "agent"),
        Kind("tools", "tool"),
        Kind("sandboxes", "sandbox"),
        Kind("reward_functions", "reward function"),
        Kind("datasets", "data set"),
        Kind("algorithms", "algorithm"),
        Kind("reward_shaping", "reward shaping"),
        Kind("group_filters", "group filter"),
        Kind("batch_transforms", "batch transform"),
        Kind("advantages", "advantage"),
        Kind("policy_losses", "policy loss"),
        Kind("corrections", "correction"),
        Kind("regularizers", "regularizer"),
        Kind("auxiliary_losses", "auxiliary loss"),
        Kind("loss_aggregations", "loss aggregation"),
        Kind("example_tokenizers", "example tokenizer"),
        Kind("models", "model"),
        Kind("weight_transports", "weight transport", supplied=("engine", "rollouts", "address", "gpu", "timeout_s")),
        Kind("launchers", "launcher"),
        Kind("trackers", "tracker"),
        Kind("presets", "preset", Preset),
        Kind("commands", "command", Command),
        Kind("health_checks", "health check", HealthCheck),
    )
}
"""The core's kinds by name. `PluginManager.kinds` also has those that the loaded plugins add."""


def normalize(name: str) -> str:
    """Return the name of a plugin or component as it is compared: `-` is read as `_`."""
    return name.strip().replace("-", "_")


def with_article(noun: str) -> str:
    """Return the noun with "a" or "an"."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
