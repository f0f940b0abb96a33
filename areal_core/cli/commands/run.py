"""Train: resolve the config, check everything, and start the run.

Without CONFIG, the run is the first default preset of --plugins.
Ctrl-C writes a checkpoint and stops the run; --resume continues from there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_error, print_out
from areal_core.cli.request import Request, add_request_arguments, read_request
from areal_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from areal_core.config import Resolved

SUMMARY = "train"

SAFE_ON_RESUME = (
    "steps",
    "checkpoint",
    "evaluation.every",
    "evaluation.beside_training",
    "trackers",
    "weight_sync",
    "inference_engine.servers",
    "inference_engine.addresses",
    "inference_engine.max_concurrent_requests",
    "inference_engine.start_timeout_s",
    "inference_engine.update_timeout_s",
    "inference_engine.group_timeout_s",
    "inference_engine.silence_timeout_s",
    "inference_engine.health_timeout_s",
    "inference_engine.restarts",
    "training.phase_timeout_s",
    "training.collective_timeout_s",
    "launcher",
    "placement",
    "train_engine.parallel",
    "train_engine.max_tokens_per_microbatch",
    "train_engine.activation_checkpointing",
    "train_engine.activation_memory_gib",
    "train_engine.logprob_chunk_tokens",
    "train_engine.offload_parameters",
    "train_engine.offload_optimizer",
    "train_engine.profile",
)
"""Keys that may change on a resume, because they do not change what the model learns in a given step.

There are two exceptions. Keys about memory and the division of work change the rounding of sums. A change of `steps`
changes a learning rate that decays over all steps, which `areal run` logs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal run`."""
    add_request_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, but start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    parser.add_argument(
        "--resume", metavar="RUN_DIR", type=Path, help="resume the run in this folder, with its own config"
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="resume although plugins, data, models, your files or the config have changed since",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Resolve the config and run it. Return the exit code."""
    request = read_request(arguments)
    if arguments.json and not arguments.dry_run:
        raise UsageError("--json is only valid with --dry-run")
    if arguments.resume is not None:
        resolved, run_dir = _resumed(arguments.resume, request, print_error if arguments.json else print_out), None
    elif arguments.allow_changes:
        raise UsageError("--allow-changes is only valid with --resume RUN_DIR")
    else:
        from areal_core.config import resolve

        resolved = resolve(request.config, request.plugins, request.overrides)
        run_dir = _new_folder(resolved)
    from areal_core.driver.execution import execute as execute_run

    return execute_run(
        resolved,
        run_dir=run_dir,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
        show=print_out,
        allow_changes=arguments.allow_changes,
    )


def _new_folder(resolved: Resolved) -> Path:
    """Return the folder of a new run. Raise `UsageError` if it exists or cannot be made."""
    from areal_core.config.resolve import CONFIG_FILE
    from areal_core.runtime.folder import RunFolder, require_place

    folder = resolved.run_dir or Path("runs") / f"{resolved.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    choose_another = "choose another: run_dir=PATH"
    require_place("the run folder", folder, choose_another)
    functions = RunFolder(folder).functions  # train() writes them before the run is checked
    if folder.exists() and not (functions.is_dir() and [*folder.iterdir()] == [functions]):
        is_run = (folder / CONFIG_FILE).is_file()
        hints = (f"continue it: areal run --resume {folder}",) if is_run else ()
        raise UsageError(
            f"the run folder {folder} exists already" + ("" if is_run else ", and is not a run"),
            hints=(*hints, choose_another),
        )
    return folder


def _resumed(folder: Path, request: Request, log: Callable[[str], None]) -> Resolved:
    """Return the saved config with overrides. Raise `ConfigError` if they change a key that is not safe on a resume."""
    from areal_core.config import load_run
    from areal_core.config.tree import leaves
    from areal_core.files import KeptSources

    if request.config is not None:
        raise UsageError(
            f"--resume takes the config from {folder}, so CONFIG ({request.config}) cannot be named as well",
            hints=("leave it out; section.key=value changes what may be changed",),
        )
    KeptSources.use(folder.resolve() / "sources", renews=True)
    saved = load_run(folder)
    if not request.overrides and not request.plugins:
        return saved
    overrides = [*request.overrides, *_for_roles(saved, request.overrides)]
    changed = load_run(folder, overrides, request.plugins)
    before, after = leaves(saved.to_tree()), leaves(changed.to_tree())
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    lines = [f"{path}: {before.get(path)} -> {after.get(path)}" for path in paths]
    unsafe = [line for path, line in zip(paths, lines, strict=True) if not _is_safe(path)]
    folders = {"run_dir", "base_dir", "preset"}
    of_folders = [override for override in request.overrides if override.partition("=")[0] in folders]
    unsafe += [f"{override}: cannot be set on a resume" for override in of_folders]
    if unsafe:
        raise ConfigError(
            f"{len(unsafe)} of these settings cannot change on resume",
            hints=(*unsafe, f"may change: {', '.join(SAFE_ON_RESUME)}; for anything else start a new run"),
            problems=unsafe,
        )
    for line in lines:
        log(f"changed on resume: {line}")
    if "steps" in paths and {value for path, value in after.items() if path.endswith(".schedule")} != {"constant"}:
        log("the learning rate decays over all steps of the run: it changes from the first step of this resume on")
    return changed


def _for_roles(saved: Resolved, overrides: Sequence[str]) -> list[str]:
    """Return overrides of roles that change with the train engine: those of keys in which both have the same value.

    A saved config is complete: each role has its own copy of the train engine's values, which must change as well.
    """
    from areal_core.config.tree import leaves

    values = leaves(saved.to_tree())
    overrides_of_roles = []
    for override in overrides:
        engine, _, rest = override.partition(".")
        key = rest.partition("=")[0]
        for role in saved.config.roles if engine == "train_engine" else ():
            copies = {path: value for path, value in values.items() if f"{path}.".startswith(f"roles.{role}.{key}.")}
            if copies and all(values.get(path.replace(f"roles.{role}", engine, 1)) == copies[path] for path in copies):
                overrides_of_roles.append(f"roles.{role}.{rest}")
    return overrides_of_roles


def _is_safe(path: str) -> bool:
    """Return whether a key may change on a resume. Keys of roles may if they may for the train engine."""
    first, _, rest = path.partition(".")
    path = f"train_engine.{rest.partition('.')[2]}" if first == "roles" else path
    return any(path == safe or path.startswith(f"{safe}.") for safe in (*SAFE_ON_RESUME, "plugins"))
