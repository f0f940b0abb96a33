"""A run as somebody sees it who knows its folder alone: how it is, and that it shall stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from areal_core.config.yaml_text import parse
from areal_core.diagnostics import read_findings
from areal_core.driver.attempts import RECOVERING, ask_driver, driver_has_ended
from areal_core.driver.describing import describe_phases, name_order
from areal_core.errors import ArealError, RunError, UsageError
from areal_core.messages import Done, Failed
from areal_core.messages.hub import Driving, StopRun, WhoDrives

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import AttemptFolder, RunFolder

ANSWER_S = 10.0
POLL_S = 0.5
PROGRESS_S = 10.0
SHOWN = ("reward/all_episodes", "train/loss", "staleness/mean", "evaluation/reward", "servers/ready")
"""Metrics of the last step that a status tells, where they are there."""


def run_status(run: RunFolder) -> dict[str, Any]:
    """What `areal status --json` writes.

    Returns:
        `state` (running, done, interrupted, failed; recovering, between two attempts; lost, where its driver has exited
        without a word; unreachable, where it does not answer and cannot be seen from here), `attempt`, `step`, `steps`,
        `checkpoint` (its step, or None), `seconds_since_step`, `metrics`, `diagnostics` (each with `step` and `text`;
        notes from before the start have step 0); of a running one `host`, `pid`, `is_ending`, `processes`: by name the
        fields of `areal_core.messages.hub.Process`.

    Raises:
        UsageError: nothing was ever started there.
    """
    attempt = _last_attempt(run)
    lines = run.read_metrics()
    last = lines[-1] if lines else {}
    found: dict[str, Any] = {
        "state": "running",
        "attempt": attempt.number,
        "step": int(last.get("step", 0)),
        "steps": _steps(run),
        "checkpoint": run.last_step,
        "seconds_since_step": time.time() - last["time"] if "time" in last else None,
        "metrics": {name: last[name] for name in SHOWN if name in last},
        "diagnostics": read_findings(run.path),
    }
    if attempt.released.exists():
        word = attempt.outcome.word if attempt.outcome is not None else "failed"
        is_lost = word == RECOVERING and driver_has_ended(attempt)
        return {**found, "state": "lost" if is_lost else word}
    driving = ask_driver(attempt, WhoDrives(), ANSWER_S)
    if not isinstance(driving, Driving):
        if attempt.released.exists():  # it has ended while it was asked
            return run_status(run)
        return {**found, "state": "lost" if driver_has_ended(attempt) else "unreachable"}
    processes = {
        name: msgspec.structs.asdict(process)
        for name, process in sorted(driving.processes.items(), key=lambda one: name_order(one[0]))
    }
    told = {"processes": processes, "is_ending": driving.is_ending}
    return {**found, "host": driving.host, "pid": driving.pid, **told}


def stop_run(run: RunFolder, *, now: bool, patience_s: float, log: Callable[[str], None]) -> str:
    """Ask a run to stop after a checkpoint, and wait until it has; what became of it, as `run_status` says it.

    Args:
        run: its folder.
        now: end it at once, keeping the last checkpoint.
        patience_s: for how long it is waited for; 0 asks and returns `running`.
        log: told now and then what is waited for.

    Raises:
        UsageError: it does not run.
        RunError: it does not answer, or has not stopped in time.
    """
    began = told = time.monotonic()
    while (state := run_status(run)["state"]) == RECOVERING and time.monotonic() - began < patience_s:
        time.sleep(POLL_S)
    attempt = _last_attempt(run)
    if state in ("done", "interrupted"):
        return state
    if state not in ("running", "unreachable"):
        raise UsageError(f"the run in {run.path} is not running: areal status says '{state}'")
    answer = ask_driver(attempt, StopRun(now), ANSWER_S)
    if not isinstance(answer, Done):
        why = answer.text if isinstance(answer, Failed) else "its driver does not answer"
        raise RunError(f"the run in {run.path} cannot be stopped from here: {why}")
    while time.monotonic() - began < patience_s:
        # A driver that ends does not listen any more, and has released the run only when all has ended.
        if (state := run_status(run)["state"]) not in ("running", RECOVERING, "unreachable"):
            return str(state)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            log(f"waited {told - began:.0f} s for the run to stop: {waits_for(run_status(run))}")
        time.sleep(POLL_S)
    if not patience_s:
        return "running"
    raise RunError(
        f"the run has not stopped within {patience_s:g} s: {waits_for(run_status(run))}",
        hints=[f"it is still stopping: areal status {run.path}; at once: areal stop {run.path} --now"],
    )


def waits_for(status: dict[str, Any]) -> str:
    """What a run that stops waits for: what each process is doing."""
    phases = {name: one["phase"] for name, one in status.get("processes", {}).items()}
    return describe_phases(phases) or str(status["state"])


def _last_attempt(run: RunFolder) -> AttemptFolder:
    if run.last_attempt is None:
        raise UsageError(f"{run.path} is not a run that was started", hints=["name the folder of a run: runs/..."])
    return run.last_attempt


def _steps(run: RunFolder) -> int | None:
    """That the config asks for; None where it cannot be read."""
    try:
        return int(parse(run.config.read_text(), str(run.config)).values["steps"])
    except (OSError, ArealError, ValueError, LookupError, TypeError):
        return None
