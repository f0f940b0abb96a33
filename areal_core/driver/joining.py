"""This process as a machine of a run that somebody else spreads, from before the run is there to its end."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from areal_core.driver.attempts import exit_code_of, read_note
from areal_core.errors import RunError
from areal_core.launchers.node import serve_node
from areal_core.messages import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import AttemptFolder, RunFolder

POLL_S = 0.5
PROGRESS_S = 10.0
GONE_S = 90.0
"""For another driver to go on with a run whose driver is gone."""
SETTLED_S = 120.0
"""After which a run that is done, and that another rank was to go on with, stays as it is."""


def join_run(run: RunFolder, *, patience_s: float, log: Callable[[str], None], is_started: bool) -> int:
    """Be a machine of a run, attempt after attempt, until it has ended; its exit code.

    Args:
        run: its folder, which need not be there yet.
        patience_s: for the run to be there.
        log: shows a line to the user.
        is_started: whether another rank of the same scheduler starts the run, or goes on with it, about now: that it
            was done before says nothing for a while.

    Raises:
        RunError: the run is not there in time, its driver has exited, or it does not take this machine.
    """
    began = told = time.monotonic()
    served: int | None = None
    while True:
        attempt = run.last_attempt
        code = exit_code_of(attempt) if attempt is not None else None
        is_settled = not is_started or time.monotonic() - began > SETTLED_S
        if code is not None and (served is not None or (not code and is_settled)):
            log(f"the run in {run.path} has ended with exit code {code}")
            return code
        is_new = attempt is not None and code is None and attempt.number != served and not attempt.released.exists()
        if is_new and attempt is not None and _serve(attempt, log):
            served = attempt.number
            began = told = time.monotonic()
            continue
        now, limit_s = time.monotonic(), GONE_S if served is not None else patience_s
        if now - began > limit_s:
            what = "its driver has exited" if served is not None else "no driver of it answers"
            raise RunError(
                f"there is no run to join in {run.path} within {limit_s:g} s: {what}",
                hints=[f"start it: areal run ... launcher.type=external launcher.nodes=N run_dir={run.path}", _at(run)],
            )
        if now - told > PROGRESS_S:
            told = now
            stopped = "" if code is None else f", which was stopped: areal run --resume {run.word}"
            log(f"waited {now - began:.0f} s, of {limit_s:g} s at most, for the run in {run.path}{stopped}")
        time.sleep(POLL_S)


def _serve(attempt: AttemptFolder, log: Callable[[str], None]) -> bool:
    """Be a machine of an attempt; whether its driver was there."""
    note, token = read_note(attempt)
    shown = Credentials(token, attempt.number)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        message = f"a machine of the run in {attempt.run}, attempt {attempt.number}"
        asyncio.run(serve_node(note.address, shown, lambda: log(message)))
        return True
    except OSError:
        return False
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _at(run: RunFolder) -> str:
    """Where the driver was, for whoever looks why it is not reached."""
    if run.last_attempt is None:
        return f"no run is in {run.path} yet"
    note, _ = read_note(run.last_attempt)
    return f"its driver was on {note.host}, at {note.address}: name another address with launcher.host=ADDRESS"
