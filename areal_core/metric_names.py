"""Names of metrics: which ones belong to the run itself, and the prefix that all others get.

Workflows and hooks of plugins return numbers under names of their own choice. A prefix keeps them apart from the run's
own metrics, so that they can neither overwrite one nor be taken for one:

    a workflow in a file        workflow/NAME       workflow/tool_calls
    a workflow of a plugin      PLUGIN/NAME         agents/turns
    a hook of a plugin          PLUGIN/NAME         reward_guard/decline
    an inference engine         servers/NAME        servers/ready; names below weight_sync/ stay
"""

from __future__ import annotations

from typing import Final

from areal_core.errors import writable

OWN_NAMES: Final = frozenset({"episodes", "failed", "response_length", "reward", "step", "time", "version"})
"""The run's own metrics without a slash. Those of evaluations have `evaluation/` in front."""
OWN_PREFIXES: Final = frozenset({
    "batch", "engine", "episodes", "evaluation", "groups", "logprob_check", "reward", "rewards", "servers", "staleness",
    "time", "train", "weight_sync",
})  # fmt: skip
"""First parts of the run's own metrics with a slash."""
FILE_PREFIX: Final = "workflow"
"""First part of the metrics of a workflow that is no plugin's."""


_OF_ENGINES: Final = ("servers/", "weight_sync/")
"""Prefixes of the metrics of inference engines."""


def is_own(name: str) -> bool:
    """Return whether a metric of this name is one of the run's own, or could be taken for one."""
    first, slash, _ = name.partition("/")
    return first in OWN_PREFIXES if slash else name in OWN_NAMES


def prefix_of(plugin: str) -> str:
    """Return the prefix of a plugin's metrics, with its slash.

    A plugin whose name is a first part of the run's own metrics, such as `rewards`, gets `plugin/rewards/`.

    Args:
        plugin: its name; empty for a workflow that is no plugin's.
    """
    name = plugin or FILE_PREFIX
    return f"plugin/{name}/" if name in OWN_PREFIXES else f"{name}/"


def prefixed(prefix: str, name: object) -> str:
    """Return a metric's name with its prefix, which is not added twice, in characters that UTF-8 can encode."""
    text = writable(name)
    return text if text.startswith(prefix) else f"{prefix}{text}"


def of_engine(name: object) -> str:
    """Return the name of a metric of an inference engine: as it is below `servers/` or `weight_sync/`, else with the
    prefix `servers/`."""
    text = writable(name)
    return text if text.startswith(_OF_ENGINES) else prefixed(_OF_ENGINES[0], text)
