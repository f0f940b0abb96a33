"""Resolve files, presets, environment and command line to one checked config.

The steps are: merge the layers, load the plugins that they name, validate each section, and check across sections.
A plugin's own section may name further plugins (`type: plugin/name`). Validation then starts again, until it loads no
new plugin. One error reports all problems.

By default, areal does not import the user's own components here: their settings stay unread
(`areal_core.config.selection`). `areal_core.checks.reading` starts a child process that imports them and validates the
whole config.
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
from areal_core.config.imports import PRESET_NAMES
from areal_core.config.numbering import NUMBERED
from areal_core.config.presets import Source, default_preset, find_preset, read_file
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import Problem, dotted, from_validation
from areal_core.config.run_config import RunConfig
from areal_core.config.selection import leaving_unread, unread_selections
from areal_core.config.tree import Override, Tree, leaves, parse_override, preset_names
from areal_core.config.yaml_text import dump
from areal_core.errors import ConfigError, PluginError, PluginMissingError, UsageError
from areal_core.plugins import PluginManager
from areal_core.plugins.provenance import Provenance
from areal_core.plugins.records import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONFIG_FILE = "config.yaml"
"""The complete config in a run folder."""

_PRESET: Final = re.compile(r"[\w-]+(/[\w-]+)?")


@dataclass(frozen=True)
class Resolved:
    """A config that has passed every check, with its values, plugins and files.

    Attributes:
        config: the config. Settings of the user's own components may be unread, and are then not checked yet.
        tree: the values as written, with the origin of each.
        plugins: the loaded plugins.
        base_dir: folder that paths in the config are relative to.
        files: SHA-256 of each Python file that the config names, by path.
        name: stem of the config file, or name of the preset.
        run_dir: folder of the run; None if the config does not set it.
        notes: for `inference_engine: auto`, the chosen engine and the reasons against faster ones.
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
        """Origin of every value by its dotted path: `FILE:LINE`, `AREAL_SET`, `command line`, `default` or a key."""
        return {path: _origin(self.tree, path, value) for path, value in leaves(self.to_tree()).items()}

    def error(self, problems: Sequence[Problem]) -> ConfigError | PluginError:
        """Return one error for problems of this config, each with its file and line."""
        return _combined_error(self.tree, self.plugins, (), problems, self.name)

    def to_tree(self) -> dict[str, Any]:
        """Return all values, defaults included, as plain mappings, lists and scalars."""
        return self.config.model_dump(mode="json")

    def to_yaml(self, models: Mapping[str, str] | None = None) -> str:
        """Return the complete config as YAML that `load_run` reads. A secret appears as `env:NAME`.

        Args:
            models: folders of models by key, such as `model.path`. A folder replaces a name on the hub, so that every
                process of the run loads the same commit.
        """
        tree = self.to_tree()
        for key, folder in (models or {}).items():
            reduce(dict.__getitem__, key.split(".")[:-1], tree)["path"] = folder
        names: dict[str, str] = {}
        for path, chosen in unread_selections(self.config):
            names |= preset_names(chosen.written, path)
        loading = {"base_dir": str(self.base_dir), **({PRESET_NAMES: names} if names else {})}
        heading = f"# complete config, written by areal-core {areal_core.__version__}; `areal run` can read it\n"
        return heading + dump({**loading, **tree})

    def provenance(self) -> list[Provenance]:
        """Return the loaded plugins and the user's own files, with versions and hashes that a resume compares."""
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
    r"""Read a config, apply overrides, load the plugins and check everything.

    One error reports all problems, each with its file and line.

    Args:
        config_path: a YAML file or the name of a preset (`name` or `plugin/name`). None takes the first default preset
            of `plugins`.
        plugins: names of further plugins to load.
        overrides: `section.key=value`, and paths of YAML files. A single value takes precedence over all files. Paths
            in these files are relative to the folder of `config_path`.
        environment: variables, of which AREAL_PLUGINS and AREAL_SET are read. None takes the process's own.
        imports: whether to import the user's own components in this process, and to check their settings. If False,
            the preflight does this.

    Raises:
        ArealError: the config is wrong, a file does not exist, or a plugin cannot be loaded.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from areal_core.config import Resolved, RunConfig, resolve, selections
        >>> text = "steps: 100\nmodel: {path: /models/small}\ndataset: parts.py:Rows\n"
        >>> text += "train_engine: parts.py:Engine\nalgorithm: parts.py:Method\n"
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "parts.py").write_text("class Rows: ...\nclass Engine: ...\nclass Method: ...\n")
        ...     _ = Path(folder, "run.yaml").write_text(text)
        ...     resolved: Resolved = resolve(Path(folder, "run.yaml"), overrides=["steps=20"], environment={})
        ...     config: RunConfig = resolved.config
        ...     chosen = {path: selection.reference for path, selection in selections(config)}
        >>> config.steps, resolved.origins["steps"], resolved.origins["seed"]
        (20, 'command line', 'default')
        >>> chosen[("launcher",)]
        'core/local'
    """
    environment = os.environ if environment is None else environment
    assignments = [override for override in overrides if "=" in override]
    parsed_overrides = _parse_overrides(environment.get("AREAL_SET", ""), assignments)
    source = read_file(config_path) if config_path is not None and _is_file(config_path) else None
    files = [read_file(path) for path in overrides if "=" not in path]
    values = dict(source.document.values) if source else {}
    for file in files:
        values.update({key: file.document.values[key] for key in ("preset", "base_dir") if key in file.document.values})
    values.update({override.path[0]: override.value for override in parsed_overrides if len(override.path) == 1})
    folder = _base_folder(values, source.folder if source else Path.cwd())
    from_caller = plugin_list([*plugins, *_split_names(environment.get("AREAL_PLUGINS", ""))])
    from_files = [name for file in files for name in plugin_list(file.document.values.get("plugins"))]
    plugin_names = [*from_caller, *plugin_list(values.get("plugins")), *from_files]
    manager = PluginManager()
    errors = _add_plugins(manager, plugin_names)
    preset = None
    if values.get("preset") is not None:
        preset = find_preset(manager, str(values["preset"]), is_config=False)
    elif source is None:
        preset = (
            default_preset(manager, plugin_names, errors)
            if config_path is None
            else find_preset(manager, str(config_path), is_config=True)
        )
    if preset:
        errors += _add_plugins(manager, [*preset.plugins, *plugin_list(preset.document.values.get("plugins"))])
    layers = [layer for layer in (preset, source) if layer]
    located = [layer if layer is preset else replace(layer, folder=folder) for layer in (*layers, *files)]
    tree = _merge_layers(located, parsed_overrides)
    return _check_tree(tree, manager, errors, folder, layers[-1].stem, imports=imports)


def load_run(
    run_dir: Path, overrides: Sequence[str] = (), plugins: Sequence[str] = (), *, imports: bool = False
) -> Resolved:
    r"""Read the config of a run folder. Every process of the run reads the same one.

    The environment does not change it.

    Args:
        run_dir: folder of the run.
        overrides: `section.key=value` from the command line of a resume.
        plugins: names of further plugins from the command line of a resume.
        imports: as in `resolve`. If False, a process imports the user's components when it builds them.

    Raises:
        ArealError: the folder is not that of a run, or the config is wrong.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from areal_core.config import load_run
        >>> text = "steps: 100\nmodel: {path: /models/small}\ndataset: parts.py:Rows\n"
        >>> text += "train_engine: parts.py:Engine\nalgorithm: parts.py:Method\n"
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "parts.py").write_text("class Rows: ...\nclass Engine: ...\nclass Method: ...\n")
        ...     _ = Path(folder, "config.yaml").write_text(text)
        ...     resolved = load_run(Path(folder), overrides=["steps=200"])
        >>> resolved.config.steps, resolved.config.model.path
        (200, '/models/small')
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise UsageError(
            f"{run_dir} is not a run folder: it has no {CONFIG_FILE}",
            hints=("name the folder that `areal run` printed first",),
        )
    source = read_file(path)
    folder = _base_folder(source.document.values, source.folder)
    tree = _merge_layers([replace(source, folder=folder)], _parse_overrides("", overrides))
    manager = PluginManager()
    errors = _add_plugins(manager, [*plugin_list(tree.values.get("plugins")), *plugins])
    return _check_tree(tree, manager, errors, folder, Path(run_dir).name, imports=imports)


def import_components(resolved: Resolved) -> tuple[Resolved, list[Problem]]:
    """Import the user's own components in this process, and validate the whole config again.

    Returns:
        The config with all settings read, and its problems. If it has problems, the config is unchanged.
    """
    result = _validate(_section_values(resolved.tree), resolved.plugins, resolved.base_dir, imports=True)
    problems = [*result.problems, *(Problem((), error.message, error.hints) for error in result.errors)]
    if result.config is None or problems:
        return resolved, problems
    config = result.config.model_copy(update={"plugins": result.plugins.names})
    return replace(resolved, config=config, files=result.files), problems


def _check_tree(
    tree: Tree, manager: PluginManager, errors: list[PluginError], folder: Path, name: str, *, imports: bool
) -> Resolved:
    """Validate a tree and check across its sections. Raise one error with all problems, or return the config."""
    values = _section_values(tree)
    run_dir = tree.values.get("run_dir")
    notes: list[str] = []
    validate = partial(_validate, folder=folder, imports=imports)
    result = _choose_engine(values, manager, validate, notes) if is_automatic(values) else validate(values, manager)
    problems = list(result.problems)
    errors = [*errors, *result.errors]
    for key in ("run_dir", "base_dir"):
        if not isinstance(tree.values.get(key), str | None):
            problems.append(Problem((key,), "must be the path of a folder"))
    if result.config is None or problems or errors:
        raise _combined_error(tree, result.plugins, errors, problems, name)
    config = result.config.model_copy(update={"plugins": result.plugins.names})
    run_path = Path(run_dir) if run_dir else None
    return Resolved(config, tree, result.plugins, folder, result.files, name, run_path, tuple(notes))


def _base_folder(values: Mapping[str, Any], folder: Path) -> Path:
    """Return the absolute folder that relative paths of a config start from.

    Args:
        values: may have `base_dir`. `_check_tree` reports one that is not text.
        folder: folder of the config, which `base_dir` is relative to.
    """
    base = values.get("base_dir")
    return folder / os.path.expanduser(base) if isinstance(base, str) else folder  # noqa: PTH111  see LocalPath


def _section_values(tree: Tree) -> dict[str, Any]:
    """Return the values of a tree that belong to `RunConfig`. The other keys control how areal reads the file."""
    values = {key: value for key, value in tree.values.items() if key not in ("preset", "run_dir", "base_dir")}
    return {**values, "plugins": []}


class _Validation(NamedTuple):
    """The result of a validation. `config` is None if a value is wrong."""

    config: RunConfig | None
    problems: list[Problem]
    errors: list[PluginError]
    plugins: PluginManager
    files: dict[str, str]


def _validate(values: Mapping[str, Any], manager: PluginManager, folder: Path, *, imports: bool) -> _Validation:
    """Validate values and load the plugins that they name, until a validation loads no new plugin."""
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
            return _Validation(config, problems, errors, manager, context.files)


def _choose_engine(
    values: dict[str, Any],
    manager: PluginManager,
    validate: Callable[[Mapping[str, Any], PluginManager], _Validation],
    notes: list[str],
) -> _Validation:
    """Validate a config with one engine after the other, and return the first result without problems.

    If every engine has problems, return those that all engines share, or else those of the fastest engine.

    Args:
        values: values of a config whose inference engine is `auto`.
        manager: has the plugins that the config names.
        validate: validates values with the given plugins.
        notes: list to which a line about the chosen engine is added, and one about each engine before it.

    Raises:
        ConfigError: no engine can run on this machine.
    """
    failures: list[_Validation] = []
    for candidate in candidates(values, manager.catalog):
        plugins = PluginManager(catalog=manager.catalog)
        _add_plugins(plugins, manager.names)
        result = validate(candidate.values, plugins)
        if not result.problems and not result.errors:
            where = "on this machine" if is_local(values) else "on a cluster, where only placement names GPUs"
            notes.append(f"inference_engine: auto is {candidate.engine} {where}")
            return result
        failures.append(result)
        reasons = [f"{dotted(problem.path)}: {problem.message}" for problem in result.problems]
        reasons += [error.message for error in result.errors]
        notes.append(f"inference_engine: auto is not {candidate.engine}: {'; '.join(reasons)}")
    # A problem that every engine has does not depend on the engine: correct it first.
    fastest = failures[0]
    common = [problem for problem in fastest.problems if all(problem in failure.problems for failure in failures)]
    return fastest._replace(problems=common) if common else fastest


def _combined_error(
    tree: Tree, manager: PluginManager, errors: Sequence[PluginError], problems: Sequence[Problem], name: str
) -> ConfigError | PluginError:
    """Return one error with all problems: first the missing plugins, in one line, then broken plugins, then keys."""
    missing = list(dict.fromkeys(plugin for error in errors for plugin in getattr(error, "names", ())))
    plugin_errors = [error for error in dict.fromkeys(errors) if not isinstance(error, PluginMissingError)]
    if missing:
        alone = next((error for error in errors if getattr(error, "names", ()) == tuple(missing)), None)
        plugin_errors.insert(0, alone or manager.catalog.missing(missing))
    if len(plugin_errors) == 1 and not problems:
        return plugin_errors[0]
    entries = [(error.message, error.hints) for error in plugin_errors]
    entries += [(_message_with_origin(tree, problem), problem.hints) for problem in problems]
    messages = [message for message, _ in entries]
    if len(entries) == 1:
        return ConfigError(messages[0], hints=entries[0][1], problems=messages)
    lines = [line for message, hints in entries for line in (message, *(f"  {hint}" for hint in hints))]
    return ConfigError(f"{len(entries)} problems in {name}", hints=lines, problems=messages)


def _message_with_origin(tree: Tree, problem: Problem) -> str:
    origin = tree.origin(problem.path)
    return f"{f'{origin}: ' if origin else ''}{dotted(problem.path) or 'the config'}: {problem.message}"


def _origin(tree: Tree, path: str, value: object) -> str:
    """Return the origin of one value: where the config sets it, or sets the key from which it follows, or `default`."""
    parts = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    exact = "merged" if parts[0] == "plugins" else tree.origins.get(parts)
    if exact is None and parts[-1] == "type":
        exact = tree.origins.get(parts[:-1])
    if exact is None and (parts[0] == "placement" or parts in NUMBERED):
        exact = _origin_of_layout(tree)
    if exact is None and parts[0] == "placement" and value is not None and is_automatic(tree.values):
        exact = f"inference_engine: {AUTO}"
    if exact is None and path == "inference_engine.servers":
        exact = tree.origins.get(("placement", "generation"))
    return exact or "default"


def _origin_of_layout(tree: Tree) -> str | None:
    """Return the origin of `placement.layout`; None if the config does not set it."""
    placement = tree.values.get("placement")
    if isinstance(placement, str):
        return tree.origins.get(("placement",))
    return tree.origins.get(("placement", "layout")) if isinstance(placement, Mapping) else None


def _merge_layers(layers: Sequence[Source], overrides: Sequence[Override]) -> Tree:
    """Merge the layers, the lowest first, and then the overrides."""
    tree = Tree()
    for layer in layers:
        tree.merge(layer)
    _call_for_each(tree.assign, _in_order(overrides))
    return tree


def _in_order(overrides: Sequence[Override]) -> list[Override]:
    """Return whole sections before their keys, in whatever order they were written.

    `section=null` removes the section's keys before it, and keys after it begin a new section.
    """

    def is_cleared(number: int, path: KeyPath) -> bool:
        later = overrides[number + 1 :]
        return any(override.value is None and path[: len(override.path)] == override.path for override in later)

    kept = [override for number, override in enumerate(overrides) if not is_cleared(number, override.path)]
    return sorted(kept, key=lambda override: override.rank)


def _parse_overrides(environment: str, assignments: Sequence[str]) -> list[Override]:
    """Return the overrides in AREAL_SET, then those of the command line. Files are relative to the current folder.

    Args:
        environment: value of AREAL_SET.
        assignments: `section.key=value` from the command line.

    Raises:
        ConfigError: it has the problems of all overrides.
    """
    try:
        with_origins = [(text, "AREAL_SET") for text in shlex.split(environment)]
    except ValueError as error:
        raise ConfigError(f"AREAL_SET cannot be split into words: {error}", hints=("check its quotes",)) from None
    with_origins += [(text, "command line") for text in assignments]
    return _call_for_each(lambda item: parse_override(item[0], item[1], Path.cwd()), with_origins)


def _call_for_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return a function's results for all items. Raise one `ConfigError` with the text of every `ValueError`."""
    results, problems = [], []
    for item in items:
        try:
            results.append(function(item))
        except ValueError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise ConfigError(problems[0], problems=problems)
    if problems:
        raise ConfigError(f"{len(problems)} overrides are wrong", hints=problems, problems=problems)
    return results


def _add_plugins(manager: PluginManager, names: Sequence[str]) -> list[PluginError]:
    """Load plugins, and return the errors of those that cannot be loaded."""
    try:
        manager.add(names)
    except PluginError as error:
        return list(error.parts)
    return []


def plugin_list(written: object) -> list[str]:
    """Return the names in the key `plugins`: a list, or a text such as `grpo, hf`. Raises `ConfigError`."""
    if written is None:
        return []
    names = _split_names(written) if isinstance(written, str) else written
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError("plugins: must be a list of plugin names", hints=("for example: plugins: [grpo, hf]",))
    return [normalize(name) for name in names]


def _split_names(text: str) -> list[str]:
    return [name for name in re.split(r"[,\s]+", text) if name]


def _is_file(config_path: str | Path) -> bool:
    """Return whether CONFIG is a file. A text that could be the name of a preset is a file only if the file exists."""
    return Path(config_path).exists() or not _PRESET.fullmatch(str(config_path))
