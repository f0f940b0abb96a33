"""The audit of a run: by its controller while the run is in progress, else of its folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from areal_core.checks.fingerprints import changed_copies, saved_records
from areal_core.config.presets import read_file
from areal_core.data.sampler import PromptSampler
from areal_core.errors import RunError, UsageError
from areal_core.ledger.audit import audit_folder
from areal_core.ledger.store import DATABASE
from areal_core.messages.rollouts import Audited, AuditLedger
from areal_core.runtime.attempts import ask_role, driver_has_ended
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.rpc import Failed

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.runtime.folder import AttemptFolder

ANSWER_TIMEOUT_S = 60.0
"""Seconds for the controller of a run to audit its ledger."""


def audit_run(folder: Path) -> dict[str, Any]:
    """Return what `areal audit --json` writes.

    Raises:
        UsageError: the folder holds no ledger.
        RunError: the run is in progress and does not answer.
    """
    run = RunFolder(folder)
    latest = run.last_attempt
    if latest is not None and not latest.released.exists():
        report = _ask_controller(latest, folder)
        if report is not None:
            return report
    ledgers = [attempt.ledger for attempt in run.attempts() if (attempt.ledger / DATABASE).is_file()]
    if not ledgers:
        raise UsageError(f"{run.path} holds no ledger", hints=["name the folder of a run that was started"])
    records = saved_records(run)
    config = read_file(run.config).document.values  # as text: an audit imports no code of the user
    rows = next((int(record.version.split()[0]) for record in records if record.name == "dataset"), 0)
    sampler = PromptSampler(rows, config["seed"], shuffle=config["shuffle"]) if rows else None
    audit = audit_folder(ledgers[-1], run.path, sampler, generates=config["inference_engine"] is not None)
    audit.problems += changed_copies(run, records)
    return asdict(audit)


def _ask_controller(attempt: AttemptFolder, folder: Path) -> dict[str, Any] | None:
    """Return the controller's own audit; None if the driver of the attempt is gone."""
    reply = ask_role(attempt, "controller", AuditLedger(), ANSWER_TIMEOUT_S)
    if isinstance(reply, Audited):
        return dict(reply.report)
    if not isinstance(reply, Failed) and driver_has_ended(attempt):
        return None
    reason = reply.text if isinstance(reply, Failed) else reply
    hint = f"a run that starts or loads answers later: `areal status {folder}` says what it does"
    raise RunError(f"the run is in progress and cannot be audited now: {reason}", hints=[hint])
