"""The child process of a preflight: `python -m areal_core.checks.child FOLDER [SOURCES]`.

FOLDER has the config. It gets `reading.msgpack`, with the settings of the user's own components, and if these have no
problem `findings.json`. SOURCES are the kept sources of a run that is resumed. The child imports the code of the
config; so its output goes to a file, and only what it writes to these two files counts.

Importing the components of plugins takes most of the child's time, because they import torch. If they and the models
show no problem, `Memory` stores this in the cache folder. A later child with the same config, environment, machine and
files skips them. The user's own components are imported and tried every time, and rows are read every time.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from areal_core.checks.components import component_problems, imported_modules
from areal_core.checks.data import inspect_data, needs_tokenizer, row_checks
from areal_core.checks.findings import FINDINGS_FILE, Findings, reported
from areal_core.checks.fingerprints import module_records
from areal_core.checks.loading import loading_problems, local_models, tokenizer_of
from areal_core.checks.memory import Memory, imported_files
from areal_core.checks.reading import end_child, read_in_child, start_child, write_reading
from areal_core.checks.reward_imports import import_problems, start_importing_rewards
from areal_core.checks.rewards import argument_problems, default_rows, reward_arguments, reward_problems
from areal_core.config import load_run, public_environment, selections
from areal_core.config.resolve import CONFIG_FILE
from areal_core.files import changed_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.checks.data import RowCheck
    from areal_core.config import Resolved


def main(folder: Path) -> None:
    """Read and inspect the config in a folder, and write the results beside it."""
    unread = load_run(folder)
    reward_process = start_importing_rewards(unread.config, (folder / CONFIG_FILE).read_text(encoding="utf-8"))
    resolved, reading = read_in_child(unread)
    write_reading(reading, folder)
    if not reading.problems:
        findings = inspect(resolved, folder)
        findings.problems += [
            *reading.model_problems,
            *import_problems(reward_process),
        ]
        (folder / FINDINGS_FILE).write_bytes(msgspec.json.encode(findings))


def inspect(resolved: Resolved, folder: Path) -> Findings:
    """Check the code and the data of a config.

    Args:
        resolved: the config.
        folder: has the config as a file, and is a scratch folder for the inference engine.
    """
    text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    config, memory = resolved.config, Memory("components", text)
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
    records = [report.record for report in reports if report.record is not None]
    # Before `changed_files`: a file that changes in between is noticed by one of the two.
    records += module_records({**(stored_modules or {}), **imported_modules(resolved)})
    return Findings(
        problems=[
            *problems,
            *(problem for report in reports for problem in report.problems),
            *argument_problems(arguments, readable),
            *(f"{file} was changed while it was checked: run again" for file in changed_files()),
        ],
        rows=[*rows, *(("note", note) for note in notes), *default_rows(arguments, readable)],
        row_count=reports[0].row_count,
        records=records,
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
    """Return the files of all imported modules, and the folders of the models on this machine with all their files."""
    folders = [Path(model.path) for model in local_models(resolved).values()]
    models = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return [*imported_files(), *models]


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


if __name__ == "__main__":
    main(start_child(sys.argv[1:]))
    end_child()
