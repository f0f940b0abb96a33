"""The audit of a run, whether somebody works on it or not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from areal_core.config import load_run
from areal_core.data.sampler import PromptSampler
from areal_core.errors import RunError, UsageError
from areal_core.ledger.audit import audit_folder
from areal_core.ledger.store import DATABASE
from areal_core.messages import FrameDecoder, encode_frame
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import Forward, Forwarded
from areal_core.messages.rollouts import AuditLedger
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import ask_owner, owner_has_ended

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
    epochs = run.epochs()
    if epochs and not epochs[-1].released.exists():
        request = Forward("controller", b"".join(encode_frame(AuditLedger())))
        answer = ask_owner(epochs[-1], request, ANSWER_TIMEOUT_S)
        if isinstance(answer, Forwarded):
            reply = FrameDecoder().feed(answer.reply)[0].message
            if isinstance(reply, Failed):
                raise RunError(reply.text, hints=reply.hints)
            return dict(reply.report)
        if isinstance(answer, Failed) or not owner_has_ended(epochs[-1]):
            words = answer.text if isinstance(answer, Failed) else "its owner does not answer"
            hint = f"a run that starts or loads answers later: `areal status {folder}` says what it does"
            raise RunError(f"the run is in progress and cannot be audited now: {words}", hints=[hint])
    ledgers = [epoch.ledger for epoch in epochs if (epoch.ledger / DATABASE).is_file()]
    if not ledgers:
        raise UsageError(f"{run.path} holds no ledger", hints=["name the folder of a run that was started"])
    config = load_run(run.path).config
    sampler = PromptSampler(len(config.dataset.build()), config.seed, shuffle=config.shuffle)
    return asdict(audit_folder(ledgers[-1], run.path, sampler))
