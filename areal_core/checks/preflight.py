"""The preflight of a run, and the smaller checks that other programs call. See the package for the map."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from areal_core.checks.data import inspect_data, row_checks
from areal_core.checks.findings import FINDINGS_FILE, Findings
from areal_core.checks.fingerprints import check_unchanged, model_records
from areal_core.checks.models import StoredModels
from areal_core.checks.plan import ModelPlan, batch_rows, group_figures, group_rows, plan_models
from areal_core.checks.reading import READING_FILE, Child, read_settings
from areal_core.config.selection import unread_selections
from areal_core.disk import is_folder
from areal_core.errors import ConfigError, RunError
from areal_core.interfaces.model import ModelReference
from areal_core.runs.models import MODEL_FILES, load_tokenizer, model_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.launcher import ProcessGroup
    from areal_core.plugins.provenance import Provenance
    from areal_core.runtime.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of a preflight without problems.

    Attributes:
        rows: the plan, as labels and texts.
        figures: numbers of the plan for programs: `parameters`, `weight_sync` (bytes), `disk`, `groups`, and those of
            the engines, such as `memory`.
        records: what the run consists of: plugins, files, modules, data sets, and models that were read.
    """

    rows: list[tuple[str, str]]
    figures: dict[str, Any]
    records: list[Provenance]

    @property
    def notes(self) -> list[str]:
        """What may be unintended in the config, and how the rows of the data differ from their sources."""
        return [text for label, text in self.rows if label == "note"]

    def __str__(self) -> str:
        return "\n".join(["plan", *(f"  {label:14s} {text}" for label, text in self.rows)])

    def to_json(self) -> str:
        """Return one object: `rows`, and each figure by its name."""
        return json.dumps({"rows": self.rows, **self.figures}, indent=2)


def preflight(
    resolved: Resolved,
    run: RunFolder,
    groups: Sequence[ProcessGroup],
    *,
    starts: bool,
    is_resume: bool = False,
    allow_changes: bool = False,
) -> Preflight:
    """Check everything that a run needs before it starts. Write nothing into its folder.

    Afterwards the config has the settings that were unread.

    Args:
        resolved: the config.
        run: the run's folder, which need not exist yet.
        groups: the processes of the run, for the plan.
        starts: whether the run starts afterwards. The dry run of a new run downloads no model and hashes none.
        is_resume: whether the run was started before, so that its records are compared.
        allow_changes: whether a resume is allowed although code, data or models have changed.

    Raises:
        ConfigError: the run cannot start; `problems` has every reason.
        UsageError: the run that is resumed consists of other things than before.
    """
    config, reads_models = resolved.config, starts or is_resume
    notes = None
    if unread_selections(config) and not all(
        is_folder(resolved.base_dir / path) for path in model_paths(config).values()
    ):
        notes = read_settings(resolved)  # a wrong setting is reported before a model is downloaded
    stored = StoredModels(resolved, MODEL_FILES if reads_models else ["config.json"])
    text = resolved.to_yaml({key: str(folder) for key, folder in stored.folders.items()})
    with Child("areal_core.checks.child", text) as child:
        if unread_selections(config):  # the plan reads settings
            reading = child.reading()
            reading.apply(resolved)
            notes = reading.notes
        plan = plan_models(config, stored.by_key, run_dir=run.path)
        findings = _findings(child, resolved)
    result = combine(resolved, groups, stored, plan, findings, notes)
    records = [*result.records, *(model_records(run, stored.folders) if reads_models else ())]
    if is_resume:
        check_unchanged(run, records, allowed=allow_changes)
    return replace(result, records=records)


def _findings(child: Child, resolved: Resolved) -> Findings:
    """Wait for a child and return what it reports. A child that fails is a problem, too.

    Raises:
        ConfigError: the child has read wrong settings, and so has inspected nothing.
    """
    if problem := child.wait():
        return Findings([problem])
    if (child.folder / READING_FILE).is_file() and (problems := child.reading().problems):
        raise resolved.error(problems)
    written = child.folder / FINDINGS_FILE
    if child.exit_code == 0 and written.is_file():
        return msgspec.json.decode(written.read_bytes(), type=Findings)
    return Findings([child.failure()])


def combine(
    resolved: Resolved,
    groups: Sequence[ProcessGroup],
    stored: StoredModels,
    plan: ModelPlan,
    findings: Findings,
    notes: Sequence[str] | None = None,
) -> Preflight:
    """Combine the driver's half of a preflight with the child's. The records lack the models.

    Args:
        resolved: the config.
        groups: the processes of the run.
        stored: its models.
        plan: what they need.
        findings: what the child reports.
        notes: of the config, if another process has read its settings.

    Raises:
        ConfigError: one of the parts has problems.
    """
    config = resolved.config
    _refuse([*stored.problems, *plan.problems, *_reward_problems(config), *findings.problems])
    plugins = resolved.provenance()
    notes = (*resolved.notes, *(config.cross_notes() if notes is None else notes))
    rows = [
        ("plugins", ", ".join(record.name for record in plugins)),
        *group_rows(groups),
        *plan.rows,
        ("data", f"{config.dataset.reference}: {findings.row_count:,} rows"),
        *batch_rows(config, findings.row_count),
        *(("note", note) for note in notes),
        *findings.rows,
    ]
    records = [*plugins, *findings.records]
    return Preflight(rows, {**plan.figures, "groups": group_figures(groups)}, records)


def check_model(resolved: Resolved) -> None:
    """Check the models of a config that are on this machine. Nothing is loaded or downloaded.

    Raises:
        ConfigError: a model cannot be read, or the config cannot work with it.
    """
    stored = StoredModels(resolved)
    _refuse([*stored.problems, *plan_models(resolved.config, stored.by_key, trains=False).problems])


def check_made_model(resolved: Resolved, folder: Path, run_dir: Path, log: Callable[[str], None]) -> None:
    """Check a model that the run's source has made, and with its tokenizer the rows of the data.

    Args:
        resolved: the config.
        folder: the model's folder.
        run_dir: the run's folder, whose disk must have room for a checkpoint and the exported model.
        log: called with each note about the rows, if there is no problem.

    Raises:
        ConfigError: the config cannot work with this model.
        RunError: the tokenizer cannot be loaded, or rows cannot be used with it.
    """
    config = resolved.config
    stored = StoredModels(resolved, made=folder)
    _refuse([*stored.problems, *plan_models(config, stored.by_key, trains=False, run_dir=run_dir).problems])
    model = ModelReference(str(folder), config.model.dtype, config.model.trust_remote_code)
    checks = row_checks(config, load_tokenizer(model))
    reports = inspect_data(config, checks) if checks else []
    if problems := [problem for report in reports for problem in report.problems]:
        raise RunError("\n".join(problems))
    for report in reports:
        if report.skipped:
            log(f"note: {report.skipped}")


def check_evaluation(resolved: Resolved, *, loads_model: bool = True) -> None:
    """Check the model and the data sets of a config that generates and does not train, in this process.

    Args:
        resolved: the config.
        loads_model: whether a model of the config is loaded. Else it need not exist.

    Raises:
        ConfigError: the model or a data set cannot be used.

    Example:
        >>> from areal_core.config import resolve
        >>> from areal_core.errors import ConfigError
        >>> from areal_core.programs import check_evaluation
        >>> resolved = resolve("grpo/addition", overrides=["rewards=[]"])
        >>> try:
        ...     check_evaluation(resolved, loads_model=False)
        ... except ConfigError as error:
        ...     print(*error.problems)
        rewards: the workflow scores every answer, and there are none: set rewards
    """
    config = resolved.config
    problems = _reward_problems(config)
    if loads_model:
        stored = StoredModels(resolved, MODEL_FILES)
        problems += [*stored.problems, *plan_models(config, stored.by_key, trains=False).problems]
    reports = inspect_data(config, row_checks(config, has_code=False))
    _refuse([*problems, *(problem for report in reports for problem in report.problems)])


def _reward_problems(config: RunConfig) -> list[str]:
    """Return a problem if a workflow scores its answers with rewards, and the config has none."""
    if config.workflow is not None and config.workflow.declared("scores_answers") and not config.rewards:
        return ["rewards: the workflow scores every answer, and there are none: set rewards"]
    return []


def _refuse(problems: Iterable[str]) -> None:
    """Raise `ConfigError` if there are problems. A problem that is part of another one is left out."""
    distinct: list[str] = []
    for problem in problems:
        if not any(problem in known for known in distinct):
            distinct.append(problem)
    if distinct:
        raise ConfigError("the run cannot start", problems=distinct, hints=distinct)
