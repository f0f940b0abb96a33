"""The child process of a preflight: `python -m areal_core.checks.child FOLDER [SOURCES]`.

FOLDER has the config, and gets `findings.json`. SOURCES are the kept sources of a run that is resumed. The child
imports the code of the config; so its output goes to a file, and only what it writes to `findings.json` counts.

Importing the components of plugins takes most of the child's time, because they import torch. If they and the models
show no problem, `Memory` stores this in the cache folder. A later child with the same config, environment, machine and
files skips them. The user's own components are imported and tried every time, and rows are read every time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_core.checks.components import component_problems, imported_modules
from areal_core.checks.data import inspect_data, needs_tokenizer, row_checks
from areal_core.checks.findings import FINDINGS_FILE, Findings, reported
from areal_core.checks.loading import loading_problems, local_models, tokenizer_of
from areal_core.checks.rewards import argument_problems, default_rows, reward_arguments, reward_problems
from areal_core.config import CONFIG_FILE, load_run, public_environment, selections
from areal_core.files import KeptSources
from areal_core.runtime.folder import cache_folder
from areal_core.runtime.process_tree import adopt_orphans, end_descendants

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from areal_core.checks.data import RowCheck
    from areal_core.config import Resolved

_MOST_CONFIGS: Final = 16
"""Configs whose imports are stored. A stored file has about 300 KB: it names every module that was imported."""


def main(folder: Path) -> None:
    """Inspect the config in a folder and write the findings beside it. End the processes that its code has started."""
    adopt_orphans()  # so that `end_descendants` and the driver find daemons, too
    (folder / FINDINGS_FILE).write_bytes(msgspec.json.encode(inspect(load_run(folder), folder)))
    end_descendants()
    os._exit(0)  # skip threads and exit handlers of the imported code


def inspect(resolved: Resolved, folder: Path) -> Findings:
    """Check the code and the data of a config.

    Args:
        resolved: the config.
        folder: has the config as a file, and is a scratch folder for the inference engine.
    """
    text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    config, memory = resolved.config, Memory(text)
    stored_modules = memory.read()
    is_new = stored_modules is None
    problems = list(component_problems(resolved, folder, has_plugins=is_new))
    notes: list[str] = []
    checks: list[RowCheck] = []
    if not problems:
        checks = _prepare_row_checks(resolved, problems, has_tokenizer=is_new or needs_tokenizer(config))
        if is_new:
            problems += loading_problems(resolved)
            if not problems:
                memory.write(imported_modules(resolved), _files_read(resolved))
    reports = inspect_data(config, checks, has_records=True)
    arguments: dict[str, dict[str, bool]] = {}
    if not problems:
        with _public_variables(text):
            problems += reward_problems(config, reports)
        if any(chosen.record is None for _, chosen in selections(config.algorithm)):
            from areal_core.checks.algorithm_trial import try_algorithm  # imports torch

            try_algorithm(config, problems, notes)
        arguments = {f"rewards.{n}": reward_arguments(chosen) for n, chosen in enumerate(config.rewards)}
    readable = [report for report in reports if report.keys]
    rows = [("note", note) for report in reports for note in (*report.notes, report.skipped) if note]
    return Findings(
        problems=[
            *problems,
            *(problem for report in reports for problem in report.problems),
            *argument_problems(arguments, readable),
        ],
        rows=[*rows, *(("note", note) for note in notes), *default_rows(arguments, readable)],
        row_count=reports[0].row_count,
        records=[report.record for report in reports if report.record is not None],
        modules={**(stored_modules or {}), **imported_modules(resolved)},
    )


def _prepare_row_checks(resolved: Resolved, problems: list[str], *, has_tokenizer: bool) -> list[RowCheck]:
    """Return the checks of a row; none if the tokenizer cannot be loaded or the workflow cannot be built.

    Args:
        resolved: the config.
        problems: gets the reason.
        has_tokenizer: whether to load the tokenizer.
    """
    checks: list[RowCheck] = []
    tokenizer, unloadable = None, len(problems)
    with reported("model.path", problems):
        tokenizer = tokenizer_of(resolved) if has_tokenizer else None
    if len(problems) == unloadable:
        with reported("workflow" if resolved.config.workflow else "algorithm", problems):
            checks = row_checks(resolved.config, tokenizer)
    return checks


def _files_read(resolved: Resolved) -> list[Path]:
    """Return the files of all imported modules, and the folders of the models on this machine with all their files.

    The time stamp of a folder changes when a file is added.
    """
    modules = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    folders = [Path(model.path) for model in local_models(resolved).values()]
    models = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return [*(path for path in modules if path.is_file()), *models]


@contextmanager
def _public_variables(text: str) -> Iterator[None]:
    """Hide environment variables that are named like secrets, as in the processes that call rewards in a run.

    Args:
        text: the config. Secrets that it names are not hidden.
    """
    hidden = {name: os.environ.pop(name) for name in os.environ.keys() - public_environment(text).keys()}
    try:
        yield
    finally:
        os.environ.update(hidden)


class Memory:
    """Configs whose plugin components could be imported and whose models could be loaded, in the cache folder.

    An entry holds for one config, machine and environment, for the same names in the folders of `sys.path` (a package
    that is installed adds one), and as long as no file that was read has changed.

    Args:
        text: the config.
    """

    def __init__(self, text: str) -> None:
        names = [_names(Path(folder)) for folder in sys.path]
        key = [text, platform.node(), sys.prefix, sys.path, names, sorted(public_environment(text).items())]
        self._path = cache_folder() / "checked" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"

    def read(self) -> dict[str, str] | None:
        """Return the user's own modules that were imported, each with its file; None if the checks must be repeated."""
        with suppress(OSError, msgspec.DecodeError):
            stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
            if stored.times == _times(map(Path, stored.times)):
                return stored.modules
        return None

    def write(self, modules: dict[str, str], files: list[Path]) -> None:
        """Store that the checks showed no problem, and remove the oldest entries of other configs.

        If the cache folder cannot be written to, the next preflight repeats the checks.

        Args:
            modules: the user's own modules that were imported, each with its file.
            files: files and folders that the checks depend on.
        """
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            fresh.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(_Stored(_times(files), modules)))
            fresh.replace(self._path)
            stored = sorted(fresh.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in stored[:-_MOST_CONFIGS]:
                path.unlink()


class _Stored(msgspec.Struct):
    """What `Memory` writes: the time stamp of each file or folder in nanoseconds, and the user's own modules."""

    times: dict[str, int]
    modules: dict[str, str]


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it is not a folder or cannot be read."""
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _times(paths: Iterable[Path]) -> dict[str, int]:
    """Return the time stamps of files by path.

    Raises:
        OSError: a file is missing.
    """
    return {str(path): path.stat().st_mtime_ns for path in paths}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        KeptSources.use(Path(sys.argv[2]), renews=True)
    main(Path(sys.argv[1]))
