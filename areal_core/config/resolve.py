"""From files, presets, environment and command line to one checked config.

The order of a resolution: lay the layers, load the plugins that they name, validate, and check across sections.
Validating may name further plugins (`type: plugin/name` inside a plugin's own section); it is repeated until it does
not. All mistakes are collected, and one error has them all.

By default none of the user's own components is imported: their settings stay unread (`areal_core.config.selection`).
`areal_core.checks.reading` lets a child process import them and validate the whole config.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

import areal_core
from areal_core.config.automatic import AUTO, candidates, is_automatic, is_local
from areal_core.config.context import ResolutionContext
from areal_core.config.numbering import NUMBERED
from areal_core.config.presets import Source, default_preset, find_preset, read_file
from areal_core.config.problems import Problem, dotted, from_validation
from areal_core.config.run_config import RunConfig
from areal_core.config.selection import leaving_unread
from areal_core.config.tree import Override, Tree, leaves, parse_override
from areal_core.config.yaml_text import dump
from areal_core.errors import ConfigError, PluginError, PluginMissingError, UsageError
from areal_core.plugins import PluginManager, Provenance
from areal_core.plugins.records import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONFIG_FILE = "config.yaml"
"""The complete config in a run folder."""

_PRESET: Final = re.compile(r"[\w-]+(/[\w-]+)?")


@dataclass(frozen=True)
class Resolved:
    """A config that has passed every check, with what is needed to explain it and to resolve it again elsewhere.

    Attributes:
        config: the config. Settings of the user's own components may be unread, and are then not checked yet.
        tree: the values as they were written, with the place of each.
        plugins: the loaded plugins.
        base_dir: the folder that paths in the config are relative to.
        files: SHA-256 of every Python file that the config names.
        name: stem of the config file, or name of the preset.
        run_dir: folder of the run, if the config sets it.
        notes: which engine `inference_engine: auto` is, and why not a faster one.
    """

    config: RunConfig
    tree: Tree
    plugins: PluginManager
    base_dir: Path
    files: dict[str, str]
    name: str
    run_dir: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def origins(self) -> dict[str, str]:
        """Where every single value came from, by its dotted path."""
        return {path: _origin(self.tree, path, value) for path, value in leaves(self.to_tree()).items()}

    def error(self, problems: Sequence[Problem]) -> ConfigError | PluginError:
        """Return the error for problems of this config: each with its file and line."""
        return _joined(self.tree, self.plugins, (), problems, self.name)

    def to_tree(self) -> dict[str, Any]:
        """Every value, defaults included, as plain mappings, lists and scalars."""
        return self.config.model_dump(mode="json")

    def to_yaml(self, models: Mapping[str, str] | None = None) -> str:
        """The complete config as a file that `load_run` reads back; secrets appear as `env:NAME`.

        Args:
            models: folders by the key that names a model: who reads the file takes that commit of one from the hub.
        """
        tree = self.to_tree()
        for key, folder in (models or {}).items():
            reduce(dict.__getitem__, key.split(".")[:-1], tree)["path"] = folder
        heading = f"# complete config, written by areal-core {areal_core.__version__}; `areal run` can read it\n"
        return heading + dump({"base_dir": str(self.base_dir), **tree})

    def provenance(self) -> list[Provenance]:
        """The plugins, and every file of the user's own that was loaded by path, as `compare` compares them."""
        files = sorted(self.files.items())
        return [*self.plugins.provenance(), *(Provenance(path, "", "", path, digest) for path, digest in files)]


def resolve(
    config_path: str | Path | None,
    plugins: Sequence[str] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    imports: bool = False,
) -> Resolved:
    """Read a config and the values that override it. One error has all problems.

    Args:
        config_path: a YAML file or the name of a preset (`name` or `plugin/name`); None is the first default preset
            of `plugins`.
        plugins: names of plugins to load as well.
        overrides: `section.key=value`, and YAML files, which lie below these. Paths in the files begin at the folder
            of `config_path`.
        environment: has AREAL_PLUGINS and AREAL_SET; by default it is the process's own.
        imports: whether to import the user's own components in this process, and to check their settings and the whole
            config with them. Without, this is left to the preflight.

    Raises:
        ArealError: the config is wrong.
    """
    environment = os.environ if environment is None else environment
    overrides_read = _overrides(environment.get("AREAL_SET", ""), [word for word in overrides if "=" in word])
    source = read_file(config_path) if config_path is not None and _is_file(config_path) else None
    folder = source.folder if source else Path.cwd()
    files = [replace(read_file(word), folder=folder) for word in overrides if "=" not in word]
    written = dict(source.document.values) if source else {}
    written.update({key: value for file in files for key, value in file.document.values.items() if key == "preset"})
    written.update({override.path[0]: override.value for override in overrides_read if len(override.path) == 1})
    added = [name for file in files for name in plugin_list(file.document.values.get("plugins"))]
    asked = plugin_list([*plugins, *_words(environment.get("AREAL_PLUGINS", ""))])
    wanted = [*asked, *plugin_list(written.get("plugins")), *added]
    manager = PluginManager()
    errors = _add(manager, wanted)
    preset = None
    if written.get("preset") is not None:
        preset = find_preset(manager, str(written["preset"]), is_config=False)
    elif source is None:
        preset = (
            default_preset(manager, wanted, errors)
            if config_path is None
            else find_preset(manager, str(config_path), is_config=True)
        )
    if preset:
        errors += _add(manager, [*preset.plugins, *plugin_list(preset.document.values.get("plugins"))])
    layers = [layer for layer in (preset, source) if layer]
    tree = _tree([*layers, *files], overrides_read)
    return _finish(tree, manager, errors, folder, layers[-1].stem, imports=imports)


def load_run(
    run_dir: Path, overrides: Sequence[str] = (), plugins: Sequence[str] = (), *, imports: bool = False
) -> Resolved:
    """Return the config of a run folder, as every process of the run reads it. The environment does not change it.

    Args:
        run_dir: the folder.
        overrides: from the command line of a resume.
        plugins: from the command line of a resume.
        imports: as in `resolve`. Without, a process imports the user's components when it builds them.

    Raises:
        ArealError: it is no run folder, or the config is wrong.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise UsageError(
            f"{run_dir} is not a run folder: it has no {CONFIG_FILE}",
            hints=("name the folder that `areal run` printed first",),
        )
    source = read_file(path)
    tree = _tree([source], _overrides("", overrides))
    manager = PluginManager()
    errors = _add(manager, [*plugin_list(tree.values.get("plugins")), *plugins])
    return _finish(tree, manager, errors, source.folder, Path(run_dir).name, imports=imports)


def import_components(resolved: Resolved) -> tuple[Resolved, list[Problem]]:
    """Validate a config again, with the user's own components imported in this process.

    Returns:
        The config with all settings read, and its problems. With any, the config is as before.
    """
    found = _validate(_section_values(resolved.tree), resolved.plugins, resolved.base_dir, imports=True)
    problems = [*found.problems, *(Problem((), error.message, error.hints) for error in found.errors)]
    if found.config is None or problems:
        return resolved, problems
    config = found.config.model_copy(update={"plugins": found.plugins.names})
    return replace(resolved, config=config, files=found.files), problems


def _finish(
    tree: Tree, manager: PluginManager, errors: list[PluginError], folder: Path, name: str, *, imports: bool
) -> Resolved:
    """Validate the tree, check across sections, and either raise one error with all problems or return the result."""
    values = _section_values(tree)
    run_dir = tree.values.get("run_dir")
    folder = Path(str(tree.values.get("base_dir", folder)))
    notes: list[str] = []
    validate = partial(_validate, folder=folder, imports=imports)
    found = _automatic(values, manager, validate, notes) if is_automatic(values) else validate(values, manager)
    problems = list(found.problems)
    errors = [*errors, *found.errors]
    if run_dir is not None and not isinstance(run_dir, str):
        problems.append(Problem(("run_dir",), "must be the path of a folder"))
    if found.config is None or problems or errors:
        raise _joined(tree, found.plugins, errors, problems, name)
    config = found.config.model_copy(update={"plugins": found.plugins.names})
    home = Path(run_dir) if run_dir else None
    return Resolved(config, tree, found.plugins, folder, found.files, name, home, tuple(notes))


def _section_values(tree: Tree) -> dict[str, Any]:
    """Return the values of a tree that `RunConfig` knows. The other keys say how the file is read."""
    values = {key: value for key, value in tree.values.items() if key not in ("preset", "run_dir", "base_dir")}
    return {**values, "plugins": []}


class _Validated(NamedTuple):
    """What validating a config's values has found; `config` is None where some value is wrong."""

    config: RunConfig | None
    problems: list[Problem]
    errors: list[PluginError]
    plugins: PluginManager
    files: dict[str, str]


def _validate(values: Mapping[str, Any], manager: PluginManager, folder: Path, *, imports: bool) -> _Validated:
    """Validate, and load the plugins that the config names, until it names no further ones."""
    errors: list[PluginError] = []
    while True:
        known, context = manager.names, ResolutionContext(manager, folder, imports=imports)
        config, problems = None, []
        try:
            config = RunConfig.model_validate(values, context=context)
            with nullcontext() if imports else leaving_unread():
                problems = list(config.cross_checks())
        except ValidationError as error:
            problems = from_validation(error)
        errors += context.plugin_errors
        if manager.names == known:
            return _Validated(config, problems, errors, manager, context.files)


def _automatic(
    values: dict[str, Any],
    manager: PluginManager,
    validate: Callable[[Mapping[str, Any], PluginManager], _Validated],
    notes: list[str],
) -> _Validated:
    """Validate with one engine after the other, and return the first result without problems.

    If there is none, the result has what all engines refuse, or else the reasons of the fastest one.

    Args:
        values: whose inference engine is `auto`.
        manager: with the plugins that the config asks for.
        validate: validates the values with one engine.
        notes: get a line about the choice, and one about each engine that was passed over.

    Raises:
        ConfigError: no engine can run on this machine.
    """
    tried: list[_Validated] = []
    for candidate in candidates(values, manager.catalog):
        plugins = PluginManager(catalog=manager.catalog)
        _add(plugins, manager.names)
        found = validate(candidate.values, plugins)
        if not found.problems and not found.errors:
            where = "on this machine" if is_local(values) else "on a cluster, where only placement names GPUs"
            notes.append(f"inference_engine: auto is {candidate.engine} {where}")
            return found
        tried.append(found)
        reasons = [f"{dotted(problem.path)}: {problem.message}" for problem in found.problems]
        reasons += [error.message for error in found.errors]
        notes.append(f"inference_engine: auto is not {candidate.engine}: {'; '.join(reasons)}")
    # What every engine refuses is the config's own mistake; else the fastest engine's reasons are worth most.
    common = [problem for problem in tried[0].problems if all(problem in found.problems for found in tried)]
    return tried[0]._replace(problems=common) if common else tried[0]


def _joined(
    tree: Tree, manager: PluginManager, errors: Sequence[PluginError], problems: Sequence[Problem], name: str
) -> ConfigError | PluginError:
    """Return one error with all problems: missing plugins first and together, then mistakes in the order of keys."""
    missing = list(dict.fromkeys(plugin for error in errors for plugin in getattr(error, "names", ())))
    plugin_errors = [error for error in errors if not isinstance(error, PluginMissingError)]
    if missing:
        alone = next((error for error in errors if getattr(error, "names", ()) == tuple(missing)), None)
        plugin_errors.insert(0, alone or manager.catalog.missing(missing))
    if len(plugin_errors) == 1 and not problems:
        return plugin_errors[0]
    mistakes = [(error.message, error.hints) for error in plugin_errors]
    mistakes += [(_placed(tree, problem), problem.hints) for problem in problems]
    messages = [message for message, _ in mistakes]
    if len(mistakes) == 1:
        return ConfigError(messages[0], hints=mistakes[0][1], problems=messages)
    lines = [line for message, hints in mistakes for line in (message, *(f"  {hint}" for hint in hints))]
    return ConfigError(f"{len(mistakes)} problems in {name}", hints=lines, problems=messages)


def _placed(tree: Tree, problem: Problem) -> str:
    origin = tree.origin(problem.path)
    return f"{f'{origin}: ' if origin else ''}{dotted(problem.path) or 'the config'}: {problem.message}"


def _origin(tree: Tree, path: str, value: object) -> str:
    """The origin of one value; a section that only chooses a component has its other values by default."""
    parts = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    exact = "merged" if parts[0] == "plugins" else tree.origins.get(parts)
    if exact is None and parts[-1] == "type":
        exact = tree.origins.get(parts[:-1])
    if exact is None and (parts[0] == "placement" or parts in NUMBERED):
        exact = _origin_of_words(tree)
    if exact is None and parts[0] == "placement" and value is not None and is_automatic(tree.values):
        exact = f"inference_engine: {AUTO}"
    if exact is None and path == "inference_engine.servers":
        exact = tree.origins.get(("placement", "generation"))
    return exact or "default"


def _origin_of_words(tree: Tree) -> str | None:
    """Where the words of a placement came from; None where it has none."""
    placement = tree.values.get("placement")
    if isinstance(placement, str):
        return tree.origins.get(("placement",))
    return tree.origins.get(("placement", "layout")) if isinstance(placement, Mapping) else None


def _tree(layers: Sequence[Source], overrides: Sequence[Override]) -> Tree:
    """Merge the layers, the lowest first, and then the overrides."""
    tree = Tree()
    for layer in layers:
        tree.merge(layer)
    _each(tree.assign, sorted(overrides, key=lambda override: override.rank))
    return tree


def _overrides(environment: str, words: Sequence[str]) -> list[Override]:
    """The overrides of both layers, the environment's first; each is relative to the current folder."""
    try:
        layers = [(word, "AREAL_SET") for word in shlex.split(environment)]
    except ValueError as error:
        raise ConfigError(f"AREAL_SET cannot be split into words: {error}", hints=("check its quotes",)) from None
    layers += [(word, "command line") for word in words]
    return _each(lambda layer: parse_override(layer[0], layer[1], Path.cwd()), layers)


def _each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return the results for all items. One `ConfigError` has every `ValueError`."""
    results, faults = [], []
    for item in items:
        try:
            results.append(function(item))
        except ValueError as error:
            faults.append(str(error))
    if len(faults) == 1:
        raise ConfigError(faults[0], problems=faults)
    if faults:
        raise ConfigError(f"{len(faults)} overrides are wrong", hints=faults, problems=faults)
    return results


def _add(manager: PluginManager, names: Sequence[str]) -> list[PluginError]:
    try:
        manager.add(names)
    except PluginError as error:
        return list(error.parts)
    return []


def plugin_list(written: object) -> list[str]:
    """The plugins that `plugins:` names, be it a list or a text."""
    if written is None:
        return []
    words = _words(written) if isinstance(written, str) else written
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError("plugins: must be a list of plugin names", hints=("for example: plugins: [grpo, hf]",))
    return [normalize(word) for word in words]


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _is_file(config_path: str | Path) -> bool:
    """Whether CONFIG is a file; what neither exists nor looks like one may be the name of a preset."""
    return Path(config_path).exists() or not _PRESET.fullmatch(str(config_path))
