"""The child process of a preflight: `python -m areal_core.checks.child FOLDER [SOURCES]`.

FOLDER has the config, and gets `findings.json`. SOURCES are the kept sources of a run that is resumed. The child
imports the code of the config; so its output goes to a file, and only what it writes to `findings.json` counts.

Importing and trying the code takes seconds. If it shows no problem, the results are stored in the cache folder with the
time stamps of all files that were read: the modules, and the files of the models. A later child with the same config
and the same files reads the rows of the data alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_core.checks.components import component_problems, imported_modules
from areal_core.checks.data import inspect_data, needs_tokenizer, row_checks
from areal_core.checks.findings import FINDINGS_FILE, CodeFindings, Findings
from areal_core.checks.loading import loading_problems, local_models, tokenizer_of
from areal_core.checks.rewards import argument_problems, default_rows, reward_arguments, reward_problems
from areal_core.config import CONFIG_FILE, load_run, public_environment
from areal_core.errors import ArealError, RunError, line_of
from areal_core.files import KeptSources
from areal_core.runtime.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from areal_core.checks.data import RowCheck
    from areal_core.config import Resolved

_MOST_CONFIGS: Final = 16
"""Configs whose results are stored. A file of results has about 300 KB: it names every module that was imported."""


def main(folder: Path) -> None:
    """Inspect the config in a folder and write the findings beside it."""
    (folder / FINDINGS_FILE).write_bytes(msgspec.json.encode(inspect(load_run(folder), folder)))
    os._exit(0)  # skip threads and exit handlers of the imported code


def inspect(resolved: Resolved, folder: Path) -> Findings:
    """Check the code and the data of a config. Store results for the code that show no problem.

    Args:
        resolved: the config.
        folder: has the config as a file, and is a scratch folder for the inference engine.
    """
    text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    config, memory = resolved.config, Memory(text)
    stored = memory.read()
    code = stored or CodeFindings(list(component_problems(resolved, folder)))
    checks: list[RowCheck] = []
    if not code.problems:
        checks = _prepare_row_checks(resolved, code.problems, has_tokenizer=stored is None or needs_tokenizer(config))
        if stored is None:
            code.problems += loading_problems(resolved)
    reports = inspect_data(config, checks, has_records=True)
    if stored is None and not code.problems:
        from areal_core.checks.algorithm_trial import try_algorithm

        with _public_variables(text):
            code.problems += reward_problems(config, reports)
        try_algorithm(config, code.problems, code.notes)
        code.reward_arguments = {f"rewards.{n}": reward_arguments(chosen) for n, chosen in enumerate(config.rewards)}
        code.modules = imported_modules(resolved)
        if not code.problems:
            memory.write(code, _files_read(resolved))
    readable = [report for report in reports if report.keys]
    rows = [("note", note) for report in reports for note in (*report.notes, report.skipped) if note]
    return Findings(
        problems=[
            *code.problems,
            *(problem for report in reports for problem in report.problems),
            *argument_problems(code.reward_arguments, readable),
        ],
        rows=[*rows, *(("note", note) for note in code.notes), *default_rows(code.reward_arguments, readable)],
        row_count=reports[0].row_count,
        records=[report.record for report in reports if report.record is not None],
        modules={**code.modules, **imported_modules(resolved)},
    )


def _prepare_row_checks(resolved: Resolved, problems: list[str], *, has_tokenizer: bool) -> list[RowCheck]:
    """Return the checks of a row; none if the tokenizer cannot be loaded or the workflow cannot be built.

    Args:
        resolved: the config.
        problems: gets the reason.
        has_tokenizer: whether to load the tokenizer.
    """
    try:
        tokenizer = tokenizer_of(resolved) if has_tokenizer else None
    except RunError as error:
        problems.append(": ".join((f"model.path: {error.message}", *error.hints)))
        return []
    try:
        return row_checks(resolved.config, tokenizer)
    except ArealError as error:
        problems.append(": ".join((f"workflow: {error.message}", *error.hints)))
    except Exception as error:  # noqa: BLE001 - the constructor of a workflow may raise anything
        problems.append(f"workflow: it cannot be built: {type(error).__name__}: {error}{line_of(error)}")
    return []


def _files_read(resolved: Resolved) -> list[Path]:
    """Return the files of all imported modules and of the models on this machine."""
    modules = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    models = [file for model in local_models(resolved).values() for file in Path(model.path).iterdir()]
    return [path for path in (*modules, *models) if path.is_file()]


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
    """The stored results for the code of a config without problems: a file in the cache folder.

    Args:
        text: the config.
    """

    def __init__(self, text: str) -> None:
        digest = hashlib.sha256("\n".join([sys.prefix, *sys.path, text]).encode()).hexdigest()
        self._path = cache_folder() / "checked" / f"{digest}.json"

    def read(self) -> CodeFindings | None:
        """Return the results, if there are any and no file has changed since; else None."""
        with suppress(OSError, msgspec.DecodeError):
            stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
            if stored.times == _times(map(Path, stored.times)):
                return stored.code
        return None

    def write(self, code: CodeFindings, files: list[Path]) -> None:
        """Store results, and remove the oldest ones of other configs.

        If the cache folder cannot be written to, the next preflight repeats the checks.
        """
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            fresh.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.encode(_Stored(_times(files), code)))
            fresh.replace(self._path)
            stored = sorted(fresh.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in stored[:-_MOST_CONFIGS]:
                path.unlink()


class _Stored(msgspec.Struct):
    """What `Memory` writes: the time stamp of each file in nanoseconds, and the results."""

    times: dict[str, int]
    code: CodeFindings


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
