"""Join this machine to a run, from before the run exists to its end."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.processes import Credentials, polls
from areal_nodes.agent import run_agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.programs import AttemptFolder, RunFolder

POLL_S = 0.5
"""Seconds between two checks of the run folder."""
PROGRESS_S = 10.0
"""Seconds between two log lines about a run that is missing."""
RESUME_TIMEOUT_S = 90.0
"""Seconds that the run may take to be resumed after its driver has died."""
RESTART_TIMEOUT_S = 120.0
"""Seconds that rank 0 may take to resume a run that was done before; then the run counts as done."""


def join_run(run: RunFolder, *, wait_s: float, log: Callable[[str], None], is_started: bool) -> int:
    """Serve a run on this machine, one attempt after the other, until the run has ended.

    Args:
        run: folder of the run, which may not exist yet.
        wait_s: seconds that the run may take to begin.
        log: shows a line to the user.
        is_started: whether rank 0 of the same scheduler starts or resumes the run now. The run folder may then show
            for a while that an earlier start of the run is done.

    Returns:
        The exit code of the run.

    Raises:
        RunError: no driver has answered in time, or the driver refuses this machine.
    """
    timeout_s = wait_s
    served = 0  # number of the last attempt that this machine has served; attempts are numbered from 1
    while True:
        waiting_for = partial(_awaited, run)
        for waited_s in polls(POLL_S, timeout_s, log=log, waiting_for=waiting_for, log_every_s=PROGRESS_S):
            attempt = run.last_attempt
            code = None if attempt is None else attempt.exit_code
            if code is not None and (served or (code == 0 and (not is_started or waited_s > RESTART_TIMEOUT_S))):
                log(f"the run in {run.path} has ended with exit code {code}")
                return code
            is_new = attempt is not None and attempt.number != served and not attempt.released.exists()
            if attempt is not None and is_new and _serve(attempt, log):
                served = attempt.number
                timeout_s = RESUME_TIMEOUT_S
                break
        else:
            problem = "its driver has died and nothing has resumed it" if served else "no driver answers"
            raise RunError(
                f"this machine cannot join the run in {run.path}: {problem} within {timeout_s:g} s", hints=_hints(run)
            )


def _awaited(run: RunFolder) -> str:
    """Return what this machine waits for, for progress messages."""
    attempt = run.last_attempt
    if attempt is None or attempt.exit_code is None:
        return f"the run in {run.path}"
    return f"the run in {run.path}; it has stopped, resume it: areal run --resume {run.word}"


def _serve(attempt: AttemptFolder, log: Callable[[str], None]) -> bool:
    """Serve one attempt to its end. Return False if its driver did not accept this machine, because it has died."""
    credentials = Credentials(attempt.token.read_text(), attempt.number)
    message = f"this machine has joined the run in {attempt.run}, attempt {attempt.number}"
    try:
        return asyncio.run(run_agent(attempt.read_driver().address, credentials, partial(log, message)))
    except OSError:
        return False


def _hints(run: RunFolder) -> list[str]:
    """Return what the user can do about a driver that does not answer."""
    start = f"start the run: areal run ... launcher.type=external launcher.nodes=N run_dir={run.path}"
    if run.last_attempt is None:
        return [start, f"{run.path} does not exist, or contains no run: all machines must share it"]
    note = run.last_attempt.read_driver()
    return [
        f"resume the run: areal run --resume {run.word}",
        f"the driver was on {note.host}, at {note.address}: set another address with launcher.host",
    ]
