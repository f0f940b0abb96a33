"""A run as somebody sees it who knows its folder alone: how it is, and that it shall stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from areal_core.config.yaml_text import parse
from areal_core.errors import ArealError, RunError, UsageError
from areal_core.launchers.arrivals import no_word
from areal_core.launchers.nodes import name_order
from areal_core.launchers.wardens import LEASE_S
from areal_core.messages.credentials import Failed
from areal_core.messages.processes import Done, Owner, StopRun, WhoOwns
from areal_core.runs.ownership import RECOVERING, ask_owner, owner_has_ended
from areal_core.runs.silence import TOLD_S
from areal_core.runs.standing import node_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import EpochFolder, RunFolder

ANSWER_S = 10.0
POLL_S = 0.5
PROGRESS_S = 10.0
SHOWN = ("reward/all_episodes", "train/loss", "staleness/mean", "evaluation/reward")
"""Metrics of the last step that a status tells, where they are there."""


def run_status(run: RunFolder) -> dict[str, Any]:
    """What `areal status --json` writes.

    Returns:
        `state` (running, done, interrupted, failed; recovering, between two epochs; lost, where its owner is gone
        without a word; unreachable, where it does not answer and cannot be seen from here), `epoch`, `step`, `steps`,
        `checkpoint` (its step, or None), `seconds_since_step`, `metrics`; of a running one `host`, `pid`, `processes`:
        by name, `node`, `phase` and `silent_s`, `nodes`: by name, `gpus` and `silent_s`, and `node_rows`: the same in
        words, where there are several, `waits_for_nodes`: whether none has been given a process yet, `is_ending`, and
        `awaited`: nodes for which it then waits, each with the seconds after which nothing runs there any more.

    Raises:
        UsageError: nothing was ever started there.
    """
    epoch = _last_epoch(run)
    lines = run.read_metrics()
    last = lines[-1] if lines else {}
    found: dict[str, Any] = {
        "state": "running",
        "epoch": epoch.number,
        "step": int(last.get("step", 0)),
        "steps": _steps(run),
        "checkpoint": run.last_step,
        "seconds_since_step": time.time() - last["time"] if "time" in last else None,
        "metrics": {name: last[name] for name in SHOWN if name in last},
    }
    if epoch.released.exists():
        outcome = epoch.released.read_text(errors="replace").partition(" ")[0] or "failed"
        is_lost = outcome == RECOVERING and owner_has_ended(epoch)
        return {**found, "state": "lost" if is_lost else outcome}
    owner = ask_owner(epoch, WhoOwns(), ANSWER_S)
    if not isinstance(owner, Owner):
        if epoch.released.exists():  # it has ended while it was asked
            return run_status(run)
        return {**found, "state": "lost" if owner_has_ended(epoch) else "unreachable"}
    processes = {
        name: {"node": owner.nodes.get(name, ""), "phase": phase, "silent_s": owner.silent.get(name, 0.0)}
        for name, phase in sorted(owner.phases.items(), key=lambda one: name_order(one[0]))
    }
    nodes = {name: {"gpus": gpus, "silent_s": owner.silent_nodes.get(name, 0.0)} for name, gpus in owner.gpus.items()}
    told: dict[str, Any] = {"processes": processes, "nodes": nodes, "node_rows": node_rows(owner)}
    waits = not processes and not epoch.ledger.exists() and not epoch.checkpoints.exists()  # later they have ended
    told |= {"waits_for_nodes": waits, "is_ending": owner.is_ending, "awaited": dict(owner.awaited)}
    return {**found, "host": owner.host, "pid": owner.pid, **told}


def stop_run(run: RunFolder, *, now: bool, patience_s: float, say: Callable[[str], None]) -> str:
    """Ask a run to stop after a checkpoint, and wait until it has; what became of it, as `run_status` says it.

    Args:
        run: its folder.
        now: end it at once, keeping the last checkpoint.
        patience_s: for how long it is waited for; 0 asks and returns `running`.
        say: told now and then what is waited for.

    Raises:
        UsageError: it does not run.
        RunError: it does not answer, or has not stopped in time.
    """
    began = told = time.monotonic()
    while (state := run_status(run)["state"]) == RECOVERING and time.monotonic() - began < patience_s:
        time.sleep(POLL_S)
    epoch = _last_epoch(run)
    if state not in ("running", "unreachable"):
        raise UsageError(f"the run in {run.path} does not run: areal status says '{state}'")
    answer = ask_owner(epoch, StopRun(now), ANSWER_S)
    if not isinstance(answer, Done):
        why = answer.text if isinstance(answer, Failed) else "its owner does not answer"
        raise RunError(f"the run in {run.path} cannot be stopped from here: {why}")
    while time.monotonic() - began < patience_s:
        # An owner that ends does not listen any more, and has released the run only when all has ended.
        if (state := run_status(run)["state"]) not in ("running", RECOVERING, "unreachable"):
            return str(state)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            say(f"waiting since {told - began:.0f} s for the run to stop: {waits_for(run_status(run))}")
        time.sleep(POLL_S)
    if not patience_s:
        return "running"
    raise RunError(
        f"the run has not stopped within {patience_s:g} s: {waits_for(run_status(run))}",
        hints=[f"it goes on stopping: areal status {run.path}; at once: areal stop {run.path} --now"],
    )


def waits_for(status: dict[str, Any]) -> str:
    """What a run that stops waits for: nodes that are not heard, and what each process is doing."""
    if status.get("awaited"):
        return no_word(status["awaited"])
    nodes, processes = status.get("nodes", {}), status.get("processes", {})
    silent = {name: node["silent_s"] for name, node in nodes.items() if node["silent_s"] > TOLD_S}
    words = [f"the node {n} is silent, and counts as lost in {max(0.0, LEASE_S - s):.0f} s" for n, s in silent.items()]
    words += [f"{name} {one['phase']}" for name, one in processes.items() if one["node"] not in silent]
    return ", ".join(words) or status["state"]


def _last_epoch(run: RunFolder) -> EpochFolder:
    if run.last_epoch is None:
        raise UsageError(f"{run.path} is no run that was ever started", hints=["name the folder of a run: runs/..."])
    return run.last_epoch


def _steps(run: RunFolder) -> int | None:
    """That the config asks for; None where it cannot be read."""
    try:
        return int(parse(run.config.read_text(), str(run.config)).values["steps"])
    except (OSError, ArealError, ValueError, LookupError, TypeError):
        return None
