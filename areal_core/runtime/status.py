"""The status of a run for a program that knows only its folder, and the request to stop it.

The last part puts processes in words. Processes of one role that do the same share a phrase.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from areal_core.config.yaml_text import parse_yaml
from areal_core.diagnostics import read_findings
from areal_core.errors import ArealError, RunError, UsageError
from areal_core.runtime.attempts import ask_driver, driver_has_ended
from areal_core.runtime.folder import RECOVERING
from areal_core.runtime.messages import RunStatus, StatusRequest, StopRun
from areal_core.runtime.rpc import Done, Failed
from areal_core.waiting import polls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.runtime.folder import AttemptFolder, RunFolder

ANSWER_TIMEOUT_S = 10.0
"""Seconds for a driver to answer."""
IN_PROGRESS = ("running", "recovering", "unreachable")
"""States of a run whose ledger another program must not read."""
POLL_S = 0.5
"""Seconds between two checks whether a run has stopped."""
SHOWN_METRICS = ("reward/all_episodes", "train/loss", "staleness/mean", "evaluation/reward", "servers/ready")
"""Metrics of the last step that are part of the status, if the step has them."""


def run_status(run: RunFolder) -> dict[str, Any]:
    """Return what `areal status --json` writes.

    Returns:
        `state`: running, done, interrupted or failed; recovering, between two attempts; lost, if its driver exited
        without a message; unreachable, if its driver does not answer, because it is blocked or on another machine.
        `attempt`, `step`, `steps`, `checkpoint` (its step, or None), `seconds_since_step`, `metrics`,
        `diagnostics` (each with `step` and `text`; notes from before the start have step 0).
        Of a running run also `host`, `pid`, `is_ending` and `processes`: by name, the fields of
        `areal_core.runtime.messages.ProcessStatus`.

    Raises:
        UsageError: no run was ever started there.
    """
    attempt = _last_attempt(run)
    metrics = run.read_metrics()
    last_step = metrics[-1] if metrics else {}
    status: dict[str, Any] = {
        "state": "running",
        "attempt": attempt.number,
        "step": int(last_step.get("step", 0)),
        "steps": _configured_steps(run),
        "checkpoint": run.last_step,
        "seconds_since_step": time.time() - last_step["time"] if "time" in last_step else None,
        "metrics": {name: last_step[name] for name in SHOWN_METRICS if name in last_step},
        "diagnostics": read_findings(run.path),
    }
    if attempt.released.exists():
        word = attempt.outcome.word if attempt.outcome is not None else "failed"
        is_lost = word == RECOVERING and driver_has_ended(attempt)
        return {**status, "state": "lost" if is_lost else word}
    driving = ask_driver(attempt, StatusRequest(), ANSWER_TIMEOUT_S)
    if not isinstance(driving, RunStatus):
        if attempt.released.exists():  # the driver has ended while this program waited for its answer
            return run_status(run)
        return {**status, "state": "lost" if driver_has_ended(attempt) else "unreachable"}
    names = sorted(driving.processes, key=name_order)
    return {
        **status,
        "host": driving.host,
        "pid": driving.pid,
        "processes": {name: msgspec.structs.asdict(driving.processes[name]) for name in names},
        "is_ending": driving.is_ending,
    }


def stop_run(run: RunFolder, *, now: bool, patience_s: float, log: Callable[[str], None]) -> str:
    """Ask a run to stop after a checkpoint, and wait until it has stopped. Return its state, as in `run_status`.

    Args:
        run: its folder.
        now: end the run immediately and keep its last checkpoint.
        patience_s: seconds to wait. 0 asks, returns `running` and does not wait.
        log: called every 10 s with what the run waits for.

    Raises:
        UsageError: the run is not running.
        RunError: the run does not answer, or has not stopped in time.
    """
    deadline = time.monotonic() + patience_s
    for _ in polls(POLL_S, patience_s):  # between two attempts there is no driver to ask
        state = run_status(run)["state"]
        if state != RECOVERING:
            break
    if state in ("done", "interrupted"):
        return str(state)
    if state not in ("running", "unreachable"):
        raise UsageError(f"the run in {run.path} is not running: areal status says '{state}'")
    answer = ask_driver(_last_attempt(run), StopRun(now), ANSWER_TIMEOUT_S)
    if not isinstance(answer, Done):
        reason = answer.text if isinstance(answer, Failed) else "its driver does not answer"
        raise RunError(f"the run in {run.path} cannot be stopped from here: {reason}")
    if not patience_s:
        return "running"
    left_s = max(0.0, deadline - time.monotonic())
    for _ in polls(POLL_S, left_s, log=log, waiting_for=lambda: f"the run to stop: {waits_for(run_status(run))}"):
        state = run_status(run)["state"]
        # A driver releases its run when all processes have ended. Shortly before, it may not answer any more.
        if state not in ("running", RECOVERING, "unreachable"):
            return str(state)
    raise RunError(
        f"the run has not stopped within {patience_s:g} s: {waits_for(run_status(run))}",
        hints=[f"it is still stopping: areal status {run.path}; immediately: areal stop {run.path} --now"],
    )


def waits_for(status: dict[str, Any]) -> str:
    """Return what a run that stops waits for: the phases of its processes, or its state."""
    phases = {name: process["phase"] for name, process in status.get("processes", {}).items()}
    return describe_phases(phases) or str(status["state"])


def _last_attempt(run: RunFolder) -> AttemptFolder:
    if run.last_attempt is None:
        raise UsageError(f"{run.path} is not a run that was started", hints=["name the folder of a run: runs/..."])
    return run.last_attempt


def _configured_steps(run: RunFolder) -> int | None:
    """Return the number of steps in the run's config; None if it cannot be read."""
    try:
        return int(parse_yaml(run.config.read_text(), str(run.config)).values["steps"])
    except (OSError, ArealError, ValueError, LookupError, TypeError):
        return None


# Processes in words.


def describe_phases(phases: Mapping[str, str]) -> str:
    """Return `controller: generating, trainer 0-5, 7: train, trainer 6: checkpoint`.

    Args:
        phases: by the names of processes.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name in sorted(phases, key=name_order):
        alike.setdefault((_role_of(name), phases[name]), []).append(name)
    return ", ".join(f"{_join_names(names)}: {phase}" for (_, phase), names in alike.items())


def name_order(name: str) -> tuple[str, int]:
    """Return a sort key that puts worker-10 behind worker-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers in words: `0-3, 6`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in ranges)


def _role_of(name: str) -> str:
    role, _, number = name.rpartition("-")
    return role if number.isdigit() else name


def _join_names(names: Sequence[str]) -> str:
    """Return `trainer 0-7` for the names of processes of one role."""
    numbers = [int(name.rpartition("-")[2]) for name in names if _role_of(name) != name]
    return f"{_role_of(names[0])} {spans(numbers)}".strip()
