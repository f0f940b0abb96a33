"""Imports every component of a config and compares its signature with its settings. Runs in the preflight child."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.checks.findings import reported
from areal_core.checks.installed import is_installed
from areal_core.checks.rewards import reward_arguments
from areal_core.config import selections
from areal_core.config.problems import dotted
from areal_core.config.selection import CALLED_BY_NAME
from areal_core.errors import ConfigError
from areal_core.interfaces import algorithm
from areal_core.plugins.catalog import Catalog
from areal_core.plugins.records import with_article
from areal_core.runtime.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.config import Resolved, Selection

_PROTOCOLS: Final = {
    "reward_shaping": algorithm.RewardShaping,
    "group_filters": algorithm.GroupFilter,
    "batch_transforms": algorithm.BatchTransform,
    "advantages": algorithm.Advantage,
    "corrections": algorithm.Correction,
    "policy_losses": algorithm.PolicyLoss,
    "regularizers": algorithm.Regularizer,
    "auxiliary_losses": algorithm.AuxiliaryLoss,
    "loss_aggregations": algorithm.LossAggregation,
    "example_tokenizers": algorithm.ExampleTokenizer,
}
"""Kinds of functions that areal calls by position, each with the Protocol that defines the arguments."""
_METHODS: Final = {"workflows": ("run_episode",), "environments": ("reset", "step")}
"""Methods of classes, by kind."""


def component_problems(resolved: Resolved, folder: Path, *, has_plugins: bool = True) -> Iterator[str]:
    """Yield what is wrong with the plugins and components of a config, as far as importing them shows.

    Each import is written to standard error first, so that the last line names a component that ends the process.

    Args:
        resolved: the config.
        folder: scratch folder for the inference engine.
        has_plugins: whether to check components of plugins, too. The user's own components are always checked.
    """
    from areal_core.runs.engines import build_engine

    for plugin in resolved.plugins.names:
        installed = Catalog.scan().get(plugin)
        yield from installed.unmet() if installed is not None else ()
    for path, chosen in selections(resolved.config):
        if chosen.record is not None and not has_plugins:
            continue
        key = dotted(path)
        sys.stderr.write(f"importing {key}: {chosen.target}\n")
        problems: list[str] = []
        with reported(key, problems):
            if chosen.kind == "inference_engines":
                build_engine(resolved.config, RunFolder(folder), folder, None)
            else:
                kind = resolved.plugins.kinds.get(chosen.kind)
                chosen.prepare(**dict.fromkeys(kind.supplied if kind is not None else ()))
                _check_call(chosen)
        yield from problems


def _check_call(chosen: Selection) -> None:
    """Raise `ConfigError` if areal could not call a function as its Protocol defines."""
    target, protocol = chosen.load(), _PROTOCOLS.get(chosen.kind)
    if not callable(target) and (protocol is not None or chosen.kind in CALLED_BY_NAME):
        raise ConfigError(f"'{chosen.target}' is {target!r:.40}, and must be a function or a class")
    if chosen.kind == "reward_functions":
        _check_reward(chosen)
    if isinstance(target, type):
        _check_methods(chosen, target)
    if protocol is None or isinstance(target, type) or not callable(target):
        return
    names = list(inspect.signature(protocol.__call__).parameters)[1:]
    try:
        inspect.signature(target).bind(*names, **chosen.keywords())
    except ValueError:  # a function in C may not show its signature
        return
    except TypeError as error:
        raise ConfigError(f"'{chosen.target}' is called with ({', '.join(names)}) and its settings: {error}") from None


def _check_methods(chosen: Selection, target: type) -> None:
    """Raise `ConfigError` if a class lacks a method that areal calls."""
    for name in _METHODS.get(chosen.kind, ()):
        if not callable(getattr(target, name, None)):
            raise ConfigError(f"'{chosen.target}' has no method '{name}', which {with_article(chosen.noun)} needs")


def _check_reward(chosen: Selection) -> None:
    """Raise `ConfigError` if the arguments of a reward cannot be read: rows supply them by name."""
    try:
        reward_arguments(chosen)
    except ValueError as error:
        raise ConfigError(f"the arguments of '{chosen.target}' cannot be read: {error}: call it in a def") from None


def imported_modules(resolved: Resolved) -> dict[str, str]:
    """Return the user's own modules that this process has imported, by name, each with its file.

    These come from no plugin, from no installed package and not with Python. Files that the config names are left out:
    `Resolved.files` has their hashes.
    """
    plugins = [record.location for record in resolved.plugins.provenance()]
    modules = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if not path.is_file() or name == "__main__" or str(path) in resolved.files:
            continue
        if not is_installed(path) and not any(map(path.is_relative_to, plugins)):
            modules[name] = str(path)
    return modules
