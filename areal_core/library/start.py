"""`train`: from the arguments of a call to a config, and from the config to a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_core.errors import ConfigError, PluginError
from areal_core.files import ScriptStartsRun, is_importing_a_script
from areal_core.library.command import run_command
from areal_core.library.functions import reference
from areal_core.library.rows import write_rows
from areal_core.library.run import Run
from areal_core.plugins.catalog import Catalog
from areal_core.plugins.manager import survey
from areal_core.plugins.records import normalize
from areal_core.runtime.folder import RunFolder

Component: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]
"""A component: its name (`grpo`, `file.py:attr`), a function or class, or a mapping with either as `type`."""
Section: TypeAlias = Mapping[str, Any]
"""Keys of one section of the config."""
PRESET: Final = "defaults"
"""Name of the preset in which a plugin has the defaults of `train` for its algorithms."""


def train(
    config: Section | None = None,
    *,
    model: str | os.PathLike[str] | Section | None = None,
    dataset: Iterable[Mapping[str, Any]] | Component | None = None,
    rewards: Sequence[Component] | None = None,
    algorithm: Component | None = None,
    steps: int | None = None,
    workflow: Component | None = None,
    sampling: Section | None = None,
    rollout: Section | None = None,
    training: Section | None = None,
    train_engine: Component | None = None,
    inference_engine: Component | None = None,
    placement: str | Section | None = None,
    weight_sync: Section | None = None,
    roles: Section | None = None,
    evaluation: Section | None = None,
    checkpoint: Section | None = None,
    trackers: Sequence[Component] | None = None,
    launcher: Component | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    deterministic: bool | None = None,
    plugins: Sequence[str] = (),
    preset: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> Run:
    """Train a model, and return the run when it ends. Progress is printed while it runs.

    A short call is `areal_core.train(model="Qwen/Qwen3-0.6B", dataset=rows, rewards=[correct], algorithm="grpo")`.

    Each argument is a section of a config (docs/reference/config.md). You can pass a function or rows wherever a
    config takes a name. What a call leaves out comes from the preset `defaults` of the plugin that has the algorithm. A
    `config` that names an `algorithm` is complete, like a YAML file: nothing is added to it.

    Scripts need no `if __name__ == "__main__":`. The processes of the run import the script to find its functions, and
    execute it up to this call. If what is above the call is slow, put both below such a line. Functions that no file
    has, as in a notebook, are pickled into the run folder.

    Args:
        config: further keys of a config, or a whole one. A key is given here or as an argument.
        model: folder of a Hugging Face model, or its name on the hub; or the section `model`.
        dataset: rows (dictionaries, or a `datasets.Dataset`), or a data set component. A row has a `prompt`: text, or a
            list of messages. Its other keys are for the rewards. Rows hold what JSON can hold, and bytes.
        rewards: functions, or reward components. A function names what it needs: `completion`, `prompt`, a key of the
            row, and returns a number.
        algorithm: such as "grpo", "dapo" or "sft".
        steps: training steps, a batch each.
        workflow, sampling, rollout, training, train_engine, inference_engine, placement, weight_sync, roles,
            evaluation, checkpoint, trackers, launcher, seed, shuffle, deterministic: as in a config.
        plugins: names of plugins to load as well.
        preset: the preset with the defaults, as PLUGIN/NAME. Name it for an algorithm of your own.
        run_dir: folder of the run; by default a new one below `runs`.

    Returns:
        The run. `run.metrics`, `run.samples()` and `run.model` have the results.

    Raises:
        ArealError: the config is wrong, or the run failed.
        KeyboardInterrupt: Ctrl-C has stopped the run, after a checkpoint. `areal_core.open_run(folder).resume()`
            continues it.
    """
    if is_importing_a_script():
        raise ScriptStartsRun
    if isinstance(model, str | os.PathLike):
        model = {"path": os.fspath(model)}
    elif model is not None and not isinstance(model, Mapping):
        raise ConfigError(
            f"model: the processes of the run load the model, and a {type(model).__name__} cannot be given to them",
            hints=[
                "name its folder or its name on the hub; save_pretrained(FOLDER) writes a model that you have changed"
            ],
        )
    arguments = {
        "model": model, "dataset": dataset, "rewards": rewards, "algorithm": algorithm, "steps": steps,
        "workflow": workflow, "sampling": sampling, "rollout": rollout, "training": training,
        "train_engine": train_engine, "inference_engine": inference_engine, "placement": placement,
        "weight_sync": weight_sync, "roles": roles, "evaluation": evaluation, "checkpoint": checkpoint,
        "trackers": trackers, "launcher": launcher, "seed": seed, "shuffle": shuffle, "deterministic": deterministic,
        "preset": preset,
    }  # fmt: skip
    given = {key: value for key, value in arguments.items() if value is not None}
    config = {} if config is None else config
    if twice := sorted(given.keys() & config.keys()):
        raise ConfigError(
            f"train(): given as an argument and in config: {', '.join(twice)}", hints=["keep one of them"]
        )
    if "run_dir" in config:
        raise ConfigError("run_dir is no part of a config: train(config, run_dir=...)")
    values = {**config, **given}
    if "algorithm" not in config and "preset" not in values:
        values["preset"] = _defaults(values.get("algorithm"))
    folder = Path(run_dir) if run_dir else Path("runs") / f"{_name(values)}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    if folder.exists():
        raise ConfigError(
            f"the run folder {folder} exists already",
            hints=[f"resume its run with areal_core.open_run({str(folder)!r}).resume(), or choose another run_dir"],
        )
    run = RunFolder(folder.resolve())
    try:
        run_command(_written(values, run.functions), folder, plugins)
    finally:
        if run.functions.is_dir() and not run.config.is_file():  # nothing was started, so nothing stays
            for path in run.functions.iterdir():
                path.unlink()
            run.functions.rmdir()
            with suppress(OSError):
                run.path.rmdir()
    return Run(folder)


def _name(values: Mapping[str, Any]) -> str:
    """Return what the folder of a run is named after: its algorithm."""
    named = values.get("algorithm")
    named = named.get("type") if isinstance(named, Mapping) else named
    text = named if isinstance(named, str) else getattr(named, "__name__", "run")
    return text.rpartition("/")[2].rpartition(":")[2] or "run"


def _defaults(algorithm: object) -> str:
    """Return the preset with the defaults for an algorithm.

    Raises:
        ConfigError: there is no algorithm, or none of the installed plugins has defaults for it.
    """
    named = algorithm.get("type") if isinstance(algorithm, Mapping) else algorithm
    plugins = survey(Catalog.scan())
    records = [(kind, record) for plugin in plugins for kind, record in plugin.records]
    owners = {record.plugin for kind, record in records if kind == "presets" and record.name == PRESET}
    known = {record.reference: record for kind, record in records if kind == "algorithms" and record.plugin in owners}
    if isinstance(named, str):
        plugin, _, name = (normalize(part) for part in named.rpartition("/"))
        matches = [record.plugin for record in known.values() if record.name == name and plugin in ("", record.plugin)]
        if len(matches) == 1:
            return f"{matches[0]}/{PRESET}"
    if named is None:
        raise ConfigError("algorithm: is required: choose one", hints=[f"such as: {', '.join(known) or 'none'}"])
    hints = [f"name the preset whose defaults apply: preset='{owner}/{PRESET}'" for owner in sorted(owners)]
    broken = [plugin.cause for plugin in plugins if isinstance(plugin.cause, PluginError)]
    hints += [f"a plugin cannot be loaded: {cause.message}" for cause in broken]
    shown = named if isinstance(named, str) else getattr(named, "__name__", named)
    raise ConfigError(f"algorithm: no installed plugin has defaults for {shown}", hints=hints)


def _written(value: Any, functions: Path, key: str = "") -> Any:
    """Return a tree as a YAML file holds it: functions become names, and rows a data set that reads them.

    Args:
        value: the tree.
        functions: folder for functions that no file has.
        key: key of the value, if it has one.
    """
    has_splits = key == "dataset" and isinstance(value, Mapping) and hasattr(value, "column_names")
    if isinstance(value, Mapping) and not has_splits:
        return {name: _written(part, functions, name) for name, part in value.items()}
    if callable(value):
        return reference(value, functions)
    if key == "dataset" and value is not None and not isinstance(value, str):
        return write_rows(value)
    if isinstance(value, list | tuple):
        return [_written(part, functions) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str | int | float | None):
        raise ConfigError(f"a config holds texts, numbers, lists, mappings and functions, not {value!r:.60}")
    return value
