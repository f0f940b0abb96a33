"""Which of several failures is the cause, when the essential processes of an attempt end together."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from areal_core.errors import ArealError, LostError, RunError
from areal_core.runtime.member import ASKED_TO_STOP, DRIVER_GONE
from areal_core.waiting import polls_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.runtime.hub import Process
    from areal_core.runtime.messages import ProcessFailed

    Report = tuple[Process, ProcessFailed]

TIMEOUT_S = 5.0
"""Seconds to wait for the reports of processes that end together with the first one."""
POLL_S = 0.05
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""Signals that a process sends to itself. NCCL's watchdog aborts a rank because another one has failed."""


async def find_cause(reports: Sequence[Report], essential: Callable[[], Sequence[Process]]) -> ArealError:
    """Return the error that explains why the attempt has ended.

    The first of these counts:

    1. a process that the hub refused or terminated, or that never joined;
    2. a cause that a process reported as its own. One with a traceback counts only after all processes have ended or
       `TIMEOUT_S` is over: when one rank is killed, the libraries of the others raise errors that look like causes;
    3. a process that ended without a report: it was killed, lost with its node, or exited. One that crashed (`CRASHES`)
       counts only when the wait is over, after the causes with tracebacks: another failure may have made it crash;
    4. any report of an essential process.

    Args:
        reports: what processes have reported so far. It grows during the wait.
        essential: returns the processes whose end is the end of the attempt.

    Returns:
        A `LostError` if another attempt may go better, else a `RunError`.
    """
    async for waited_s in polls_async(POLL_S, TIMEOUT_S):
        is_over = waited_s >= TIMEOUT_S or all(process.ended.done() for process in essential())
        error = _find_now(reports, essential(), is_over=is_over)
        if error is not None:
            return error
    raise AssertionError("an attempt has ended, and no process of it")


def _find_now(reports: Sequence[Report], essential: Sequence[Process], *, is_over: bool) -> ArealError | None:
    failed = [process for process in essential if _has_failed(process)]
    ended_by_hub = next((process for process in failed if process.end_reason), None)
    if ended_by_hub is not None:
        return LostError(f"{ended_by_hub.name}: {ended_by_hub.end_reason}", hints=[ended_by_hub.log_hint])
    causes = [report for report in reports if report[0].is_essential and not report[1].is_consequence]
    if causes and (is_over or not causes[0][1].traceback):
        return _error_of_report(*causes[0])
    reporters = {process for process, _ in reports}
    silent = [process for process in failed if process not in reporters]
    killed = next((process for process in silent if not _has_crashed(process)), None)
    if killed is not None:
        return _error_of_exit(killed)
    if silent and is_over:
        return _error_of_exit(silent[0])
    if is_over:
        return _error_of_report(*next(report for report in reports if report[0].is_essential))
    return None


def _has_failed(process: Process) -> bool:
    if not process.ended.done():
        return False
    return process.ended.result().code != ASKED_TO_STOP and not process.has_finished


def _has_crashed(process: Process) -> bool:
    code = process.ended.result().code
    return code is not None and -code in CRASHES


def _error_of_exit(process: Process) -> ArealError:
    end = process.ended.result()
    is_loss = end.code is None or end.code < 0 or end.code == DRIVER_GONE
    kind = LostError if is_loss else RunError
    return kind(f"{process.name} on {process.place.node} {end.describe()}", hints=[process.log_hint])


def _error_of_report(process: Process, failure: ProcessFailed) -> ArealError:
    if not failure.traceback:
        kind = LostError if failure.is_loss else RunError
        return kind(failure.text, hints=failure.hints, exit_code=failure.exit_code)
    message = f"{process.name} on {process.place.node} failed: {failure.text}\n{failure.traceback}"
    return RunError(message, hints=[process.log_hint])
