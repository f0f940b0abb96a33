"""A preflight without its child: the models, the plan, and the rows of the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.checks.data import inspect_data, row_checks
from areal_core.checks.findings import Findings
from areal_core.checks.models import StoredModels
from areal_core.checks.plan import plan_models
from areal_core.checks.preflight import Preflight, combine
from areal_core.driver.groups import process_groups
from areal_core.runs.models import MODEL_FILES

if TYPE_CHECKING:
    from areal_core.config import Resolved


def plan_of(resolved: Resolved, run_dir: Path | None = None) -> Preflight:
    config, stored = resolved.config, StoredModels(resolved, MODEL_FILES)
    plan = plan_models(config, stored.by_key, run_dir=run_dir)
    reports = inspect_data(config, row_checks(config, has_code=False))
    findings = Findings(
        problems=[problem for report in reports for problem in report.problems],
        rows=[("note", note) for report in reports for note in report.notes],
        row_count=reports[0].row_count,
    )
    return combine(resolved, process_groups(config, Path()), stored, plan, findings)
