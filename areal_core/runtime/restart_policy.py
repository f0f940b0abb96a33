"""The restart policy of a run: what happens when one of its processes ends or hangs, and when an attempt is lost.

A process is *essential* or *replaceable*, as its group says (`ProcessGroup.on_exit`). Trainer ranks and the rollout
controller are essential; rollout workers and servers are replaceable. A process is *ready* when it has announced an
address.

    process      what happened                                  what follows
    -----------  ---------------------------------------------  ----------------------------------------------------
    any          it ended as the run asked                      nothing
    replaceable  it reported that its work is done, and exited  nothing
                 with 0
    essential    it reported that its work is done, whatever    nothing
                 ended it then
    replaceable  it was ready, and was killed, exited or was    restart after 0.2 s; the end number
                 lost with its node                             `ProcessGroup.restarts` + 1 within 300 s: give up; no
                                                                limit if `restarts` is None
    replaceable  the same before it was ready                   restart after 1, 5, 25, 30, 30 ... s; the third time in
                                                                a row: give up, unless it was ready once
    replaceable  it reported a cause of its own before it was   give up: the next start would fail in the same way
                 ever ready
    replaceable  it is silent, or too long in one phase         terminate it; then as above
    replaceable  it was given up: a server, or a process whose  the run continues without it
                 role another process watches
    replaceable  it was given up: any other                     end the run with that cause
    essential    it is silent, or too long in one phase         end the attempt
    essential    it was killed, never joined, or was lost with  end the attempt
                 its node
    essential    it reported a cause of its own, or exited      end the run with the first cause (`cause.py`); if that
                 with an error                                  is a loss, end the attempt
    essential    of the awaited role: it exited with 0 without  end the run
                 reporting that its work is done
    -            an attempt has ended because of a loss         begin the next attempt from the last commit, at most
                                                                `max_attempts_without_checkpoint` times in a row
                                                                without a new checkpoint; then end the run

This module decides. `Supervisor` acts on what happens to processes, `driver/execution.py` on lost attempts. The error
that ends an attempt carries the difference for essential processes: `LostError` leads to the next attempt, any other
`RunError` ends the run.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from areal_core.errors import LostError, RunError
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.waiting import backoff_s

if TYPE_CHECKING:
    from areal_core.runtime.hub import Process
    from areal_core.runtime.messages import ProcessFailed

FAILED_STARTS = 3
"""Failed starts in a row after which a process that was never ready is given up."""
WINDOW_S = 300.0
"""Seconds for which the end of a process that was ready counts against `ProcessGroup.restarts`."""
PAUSE_S = 0.2
"""Seconds before a process that was ready is restarted."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_FACTOR = 1.0, 30.0, 5.0
"""Seconds before the second start of a process that was not ready, their upper bound, and their growth."""


class Action(Enum):
    """What the supervisor does about a process."""

    NOTHING = "nothing"
    RESTART = "restart it after a pause"
    TERMINATE = "terminate it"
    GIVE_UP = "continue without it"
    END_ATTEMPT = "end the attempt"
    END_RUN = "end the run"


class Decision(NamedTuple):
    """What follows from the end of a process.

    Attributes:
        action: for the supervisor.
        pause_s: seconds before a restart.
        reason: why a process is given up or ends the run; empty for other actions.
    """

    action: Action
    pause_s: float = 0.0
    reason: str = ""


class RestartPolicy:
    """Decides on the processes of a run. It counts the ends and failed starts of the replaceable ones."""

    def __init__(self) -> None:
        self._ended_at: dict[str, list[float]] = {}
        self._failed_starts: dict[str, int] = {}
        self._were_ready: set[str] = set()

    def begin_attempt(self) -> None:
        """Forget failed starts: the next attempt starts the processes that were given up again."""
        self._failed_starts.clear()

    def after_hang(self, process: Process) -> Action:
        """Decide on a process that is silent or in one phase for too long."""
        return Action.END_ATTEMPT if process.is_essential else Action.TERMINATE

    def after_end(self, process: Process, failure: ProcessFailed | None, *, is_watched: bool) -> Decision:
        """Decide on a process that has ended.

        Args:
            process: has ended.
            failure: the cause that it reported; None if it reported nothing.
            is_watched: whether another process watches the processes of its role.
        """
        if process.is_essential:
            return Decision(Action.END_ATTEMPT if ends_attempt(process) else Action.NOTHING)
        end = process.ended.result()
        if process.is_stopping or (process.has_finished and not end.code):
            return Decision(Action.NOTHING)
        how = process.end_reason or (failure.text if failure is not None else "") or end.describe()
        if process.is_ready:
            decision = self._after_service(process, how)
        else:
            decision = self._after_failed_start(process, failure, how)
        if decision.action is Action.GIVE_UP and not (is_watched or process.group.is_server):
            return decision._replace(action=Action.END_RUN)
        return decision

    def _after_service(self, process: Process, how: str) -> Decision:
        name, now = process.name, time.monotonic()
        self._failed_starts[name] = 0
        self._were_ready.add(name)
        recent = [ended_at for ended_at in self._ended_at.get(name, []) if now - ended_at < WINDOW_S]
        self._ended_at[name] = [*recent, now]
        count, limit = len(self._ended_at[name]), process.group.restarts
        if limit is not None and count > limit:
            reason = f"ended {count} times in {WINDOW_S:g} s; the last time: {how}"
            return Decision(Action.GIVE_UP, reason=reason)
        return Decision(Action.RESTART, PAUSE_S)

    def _after_failed_start(self, process: Process, failure: ProcessFailed | None, how: str) -> Decision:
        name = process.name
        count = self._failed_starts[name] = self._failed_starts.get(name, 0) + 1
        # A process that was ready once may well be ready again: its command and its config are right.
        if name not in self._were_ready:
            if failure is not None and not failure.is_loss and not failure.is_consequence:
                return Decision(Action.GIVE_UP, reason=f"ended before it was ready: {how}")
            if count >= FAILED_STARTS:
                reason = f"could not be started {count} times in a row, the last time: {how}"
                return Decision(Action.GIVE_UP, reason=reason)
        pause_s = backoff_s(count, first_s=FIRST_PAUSE_S, factor=PAUSE_FACTOR, longest_s=LONGEST_PAUSE_S)
        return Decision(Action.RESTART, pause_s)


def ends_attempt(process: Process) -> bool:
    """Return whether the end of an essential process ends the attempt.

    It does not if the process has reported that its work is done: libraries may crash when the interpreter shuts down.
    Exit code 0 alone does not either; `Supervisor.watch` checks the awaited processes.
    """
    if not process.ended.done() or process.has_finished:
        return False
    code = process.ended.result().code
    if code == 0:
        return bool(process.end_reason)
    return code != ASKED_TO_STOP


class AttemptPolicy:
    """Decides whether a run begins another attempt after a loss.

    Args:
        limit: attempts in a row that may end without a new checkpoint; 0 allows no further attempt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._checkpoint: str | None = None
        self._in_vain = 0

    def after_loss(self, error: LostError, checkpoint: str) -> str:
        """Allow the next attempt. Return a message for the user.

        Args:
            error: ended the attempt.
            checkpoint: name of the newest checkpoint; empty without one.

        Raises:
            RunError: the run has lost too many attempts in a row at this checkpoint.
        """
        self._in_vain = self._in_vain + 1 if checkpoint == self._checkpoint else 1
        self._checkpoint = checkpoint
        if not self._limit:
            raise RunError(error.message, hints=error.hints, exit_code=error.exit_code) from error
        if self._in_vain > self._limit:
            raise RunError(
                f"{error.message}\nthe run went back {self._limit} times without reaching a new checkpoint",
                hints=(*error.hints, "or raise launcher.max_attempts_without_checkpoint"),
            ) from error
        has_trained = int(checkpoint.rpartition("-")[2] or 0) > 0
        what = "going back to the last checkpoint" if has_trained else "no checkpoint yet: the run starts over"
        return f"{error.message}\n{what} ({self._in_vain} of at most {self._limit} times without a new one)"
