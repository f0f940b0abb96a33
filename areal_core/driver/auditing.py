"""The audit of a run, whether somebody works on it or not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from areal_core.config.presets import read_file
from areal_core.data.sampler import PromptSampler
from areal_core.driver.attempts import ask_role, driver_has_ended
from areal_core.driver.fingerprints import changed_copies, saved_records
from areal_core.errors import RunError, UsageError
from areal_core.ledger.audit import audit_folder
from areal_core.ledger.store import DATABASE
from areal_core.messages import Failed
from areal_core.messages.rollouts import Audited, AuditLedger
from areal_core.runs.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TIMEOUT_S = 60.0


def audit_run(folder: Path) -> dict[str, Any]:
    """What `areal audit --json` writes.

    Raises:
        UsageError: the folder holds no ledger.
        RunError: the run is in progress and does not answer.
    """
    run = RunFolder(folder)
    attempts = run.attempts()
    if attempts and not attempts[-1].released.exists():
        reply = ask_role(attempts[-1], "controller", AuditLedger(), ANSWER_TIMEOUT_S)
        if isinstance(reply, Audited):
            return dict(reply.report)
        if isinstance(reply, Failed) or not driver_has_ended(attempts[-1]):
            words = reply.text if isinstance(reply, Failed) else reply
            hint = f"a run that starts or loads answers later: `areal status {folder}` says what it does"
            raise RunError(f"the run is in progress and cannot be audited now: {words}", hints=[hint])
    ledgers = [attempt.ledger for attempt in attempts if (attempt.ledger / DATABASE).is_file()]
    if not ledgers:
        raise UsageError(f"{run.path} holds no ledger", hints=["name the folder of a run that was started"])
    saved = saved_records(run)
    config = read_file(run.config).document.values  # as text: an audit needs nobody's code
    rows = next((int(one.version.split()[0]) for one in saved if one.name == "dataset"), 0)
    sampler = PromptSampler(rows, config["seed"], shuffle=config["shuffle"]) if rows else None
    found = audit_folder(ledgers[-1], run.path, sampler, generates=config["inference_engine"] is not None)
    found.problems += changed_copies(run, saved)
    return asdict(found)
