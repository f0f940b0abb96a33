"""Reads rows of the data sets before a run, each row once: their keys, and whether the run can use them.

Rows come from all over a data set (`spread`), because single rows may lack a key or be too long. A small data set is
read completely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from areal_core.checks.fingerprints import data_record
from areal_core.config import Settings, selections
from areal_core.errors import ConfigError
from areal_core.interfaces.dataset import name_row, notes_of, unlearnable
from areal_core.interfaces.workflow import SkippedRowError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from areal_core.config import RunConfig, Selection
    from areal_core.interfaces.dataset import Dataset
    from areal_core.plugins.provenance import Provenance

    RowCheck = Callable[[Mapping[str, Any]], str]
    """Returns why a row cannot be used; empty if it can. Raises `SkippedRowError` if a setting excludes the row."""

FIRST_ROWS: Final = 3
"""Rows of each data set that are always read, and that rewards are tried on. A wrong format shows in the first rows."""
ROWS_S: Final = 3.0
"""Seconds for reading and checking further rows of a data set."""


@dataclass(slots=True)
class DataReport:
    """What reading a data set has shown.

    Attributes:
        key: config key of the data set: `dataset` or `evaluation.dataset`.
        row_count: number of its rows.
        keys: keys of its rows, each with the name of the first row that lacks it; empty if all rows have it.
        first_rows: its first rows.
        notes: how its rows differ from their source, as the data set describes it, each with the config key.
        skipped: how many rows a setting excludes, as a note; empty if none.
        problems: each with the config key.
        record: its fingerprint; None if it was not asked for, or if there are problems.
    """

    key: str
    row_count: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    first_rows: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    problems: list[str] = field(default_factory=list)
    record: Provenance | None = None

    @property
    def title(self) -> str:
        """How messages name the data set."""
        return "the data set" if self.key == "dataset" else self.key


def inspect_data(config: RunConfig, checks: Sequence[RowCheck] = (), *, has_records: bool = False) -> list[DataReport]:
    """Read rows of the training data and of the held-out data.

    Args:
        config: of the run.
        checks: from `row_checks`.
        has_records: whether to compute fingerprints.
    """
    reports = [_inspect("dataset", config.dataset, checks, has_records)]
    if config.evaluation is not None:
        checks = () if config.workflow is None else checks  # held-out rows are not learned from
        reports.append(_inspect("evaluation.dataset", config.evaluation.dataset, checks, has_records))
    return reports


def row_checks(config: RunConfig, tokenizer: Any = None, *, has_code: bool = True) -> list[RowCheck]:
    """Return the checks of a row: those of settings, of the workflow, and the example tokenizer.

    Args:
        config: of the run.
        tokenizer: the model's; None if the model is not on this machine. Then lengths are not checked.
        has_code: whether to build the workflow or the algorithm for its checks. Without, only settings are asked.
    """
    checks: list[RowCheck] = [partial(_ask, settings, tokenizer) for settings in _settings_that_check(config)]
    if has_code and config.workflow is not None and _workflow_checks(config.workflow):
        checks.append(partial(_ask, config.workflow.build(), tokenizer))
    if has_code and config.workflow is None and tokenizer is not None:
        encode = config.algorithm.build().encode
        checks += [partial(_encode_problem, partial(encode, tokenizer=tokenizer))] if encode is not None else []
    return checks


def needs_tokenizer(config: RunConfig) -> bool:
    """Return whether a check of the rows may use the tokenizer."""
    workflow = config.workflow
    return workflow is None or _workflow_checks(workflow) or any(True for _ in _settings_that_check(config))


def spread(count: int) -> Iterator[int]:
    """Yield all indices below `count` once: the first ones, then ever finer steps over the whole range."""
    yielded = set(range(min(count, FIRST_ROWS)))
    yield from sorted(yielded)
    step = count
    while step > 1:
        step = -(-step // 2)
        for index in range(step - 1, count, step):
            if index not in yielded:
                yielded.add(index)
                yield index


def _inspect(key: str, selection: Selection, checks: Sequence[RowCheck], has_records: bool) -> DataReport:
    report = DataReport(key)
    try:
        dataset = selection.build()
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"{selection.reference} is not a data set: it has no __len__ and __getitem__",
                hints=["name a class that has both; its settings are the arguments of its __init__"],
            )
        report.row_count = len(dataset)
        notes = notes_of(dataset)
        report.notes = [f"{key}: {note}" for note in notes]
        if not report.row_count:
            report.problems.append(f"{key}: {selection.reference} is empty; it must have at least one row")
            return report
        problem = _read_rows(dataset, checks, report)
        if problem:
            report.problems.append(": ".join((f"{key}: {problem}", *notes)))
        if has_records:
            report.record = data_record(key, selection.reference, dataset)
    except ConfigError as error:
        report.problems.append(": ".join((f"{key}: {error.message}", *error.hints)))
    except Exception as error:  # noqa: BLE001 - a data set may raise anything
        report.problems.append(f"{key}: {selection.reference} cannot be read: {type(error).__name__}: {error}")
    return report


def _read_rows(dataset: Dataset, checks: Sequence[RowCheck], report: DataReport) -> str:
    """Read rows and add what they show to the report. Return why the first unusable row cannot be used."""
    deadline = time.monotonic() + ROWS_S
    problem, checked, skipped = "", 0, 0
    for number, index in enumerate(spread(report.row_count)):
        if number >= FIRST_ROWS and time.monotonic() > deadline:
            break
        row = dataset[index]
        if number < FIRST_ROWS:
            report.first_rows.append(row)
        for key in row:
            report.keys.setdefault(key, name_row(dataset, 0, report.title) if number else "")
        for key in report.keys:
            if not report.keys[key] and key not in row:
                report.keys[key] = name_row(dataset, index, report.title)
        if not problem:
            checked += 1
            try:
                reason = next(filter(None, (check(row) for check in checks)), "")
                problem = f"{name_row(dataset, index)} {reason}" if reason else ""
            except SkippedRowError:
                skipped += 1
    if skipped:
        report.skipped = (
            f"{report.key}: {skipped:,} of the {checked:,} rows that were checked are left out as too long "
            f"(overlong: skip); it has {report.row_count:,}"
        )
    if skipped and skipped == checked:
        problem = f"all {checked:,} rows that were checked are too long: see overlong"
    return problem


def _workflow_checks(workflow: Selection) -> bool:
    """Return whether the class of a workflow has a `check_row`, besides its settings."""
    return hasattr(workflow.load(), "check_row")


def _settings_that_check(config: RunConfig) -> Iterator[Settings]:
    """Yield the settings with a `check_row`: below the workflow, or below an algorithm that learns from rows."""
    for _, chosen in selections(config.workflow or config.algorithm):
        if isinstance(chosen.settings, Settings) and type(chosen.settings).check_row is not Settings.check_row:
            yield chosen.settings


def _ask(checker: Any, tokenizer: Any, row: Mapping[str, Any]) -> str:
    reason: str = checker.check_row(row, tokenizer)
    return reason


def _encode_problem(encode: Callable[[Any], Any], row: Mapping[str, Any]) -> str:
    """Return why an example tokenizer refuses a row; empty if it takes it.

    Raises:
        SkippedRowError: it skips the row.
    """
    try:
        examples = encode(row)
    except Exception as error:  # noqa: BLE001 - an example tokenizer may raise anything
        return unlearnable(error)
    if not examples:
        raise SkippedRowError("the example tokenizer skips the row")
    return ""
