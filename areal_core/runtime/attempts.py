"""Attempts of a run: which program may drive it, and questions to the program that does.

A run belongs to the program that makes the next folder below `attempts/`. `claim` makes that folder whole beside its
place and renames it, which succeeds for exactly one program. No lock file is trusted.

Whether a former driver lives is asked of the driver itself: its folder names its address, host and process.

    the former driver               its successor
    ------------------------------  ---------------------------------------------------------------------
    has released the run            claims the next attempt
    answers                         refuses to start
    is gone from this host          claims the next attempt when the last processes have ended: those that were
                                    executed with the run's token, and the guards of forked ones
    does not answer                 waits `TAKEOVER_S` seconds: processes that lost their driver end themselves after
                                    20 s without an answer. A driver that was only stopped is taken over as well

What a late process writes afterwards never counts: paths contain the attempt, and a commit first checks whether there
is a later attempt.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from areal_core.disk import open_private, sync_folder, sync_tree
from areal_core.errors import RunError, UsageError
from areal_core.runtime import frames
from areal_core.runtime.environment import TOKEN_VARIABLE
from areal_core.runtime.folder import DriverNote
from areal_core.runtime.guard import running_guards
from areal_core.runtime.messages import Forward, Forwarded, RunStatus, StatusRequest
from areal_core.runtime.process_tree import has_ended, identify, pid_of, processes_with
from areal_core.runtime.rpc import Credentials, Failed, FrameDecoder, PeerClosed, connect_blocking, encode_frame
from areal_core.waiting import polls

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from areal_core.runtime.folder import AttemptFolder, RunFolder
    from areal_core.runtime.rpc import Message

ANSWER_TIMEOUT_S = 5.0
"""Seconds for a former driver to answer."""
TAKEOVER_S = 60.0
"""Seconds after which a driver on another machine that does not answer counts as gone. Its processes end themselves
after 20 s without an answer to their heartbeats."""
TAKEOVER_POLL_S = 10.0
"""Seconds between two questions to such a driver."""
PROCESSES_TIMEOUT_S = 30.0
"""Seconds for the processes of a dead driver on this machine to end. Their guards need moments."""
PROCESSES_POLL_S = 0.02


# Claiming and releasing a run.


def next_attempt(run: RunFolder, log: Callable[[str], None]) -> AttemptFolder:
    """Return the attempt to claim, as soon as the former driver is known to be gone.

    Args:
        run: the folder.
        log: called with what the start waits for.

    Raises:
        UsageError: the run has a driver.
    """
    former = run.last_attempt
    if former is None:
        return run.attempt(1)
    require_no_driver(run)
    if not former.released.exists():
        _wait_for_driver(former, former.read_driver(), log)
        _wait_for_processes(former, former.token.read_text())
    return run.attempt(former.number + 1)


def require_no_driver(run: RunFolder) -> None:
    """Raise `UsageError` if the driver of the latest attempt answers. Wait for nothing else."""
    former = run.last_attempt
    if former is None or former.released.exists():
        return
    answer = ask_driver(former, StatusRequest(), ANSWER_TIMEOUT_S)
    if isinstance(answer, RunStatus):
        raise UsageError(
            f"another process is running in {former.run}: process {answer.pid} on {answer.host}",
            hints=["wait for it, or choose another run_dir=PATH"],
        )


def claim(attempt: AttemptFolder, address: str, credentials: Credentials) -> None:
    """Make this program the driver of an attempt.

    Raises:
        UsageError: another program was quicker, or the folder cannot be written.
    """
    note = DriverNote(address, socket.gethostname(), identify(os.getpid()))
    draft = attempt.path.with_name(f".{attempt.path.name}-{os.getpid()}-{socket.gethostname()}")
    try:
        attempt.run.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts, answers and weights are for its user only
        draft.mkdir(parents=True, exist_ok=True)
        (draft / attempt.driver.name).write_text(json.dumps(asdict(note)))
        with open_private(draft / attempt.token.name, "w") as file:
            file.write(credentials.token)
        sync_tree(draft)
        draft.rename(attempt.path)
    except OSError as error:
        if attempt.path.exists():
            raise UsageError(f"another process has just begun to run in {attempt.run}") from None
        raise UsageError(f"the run folder {attempt.run} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # these are empty only if the run never began: then nothing of it stays
            attempt.path.parent.rmdir()
            attempt.run.rmdir()
    sync_folder(attempt.path.parent)


def release(attempt: AttemptFolder, outcome: str = "") -> None:
    """Record that the driver has ended in order, so that its successor need not ask it.

    If the disk refuses, the successor asks.

    Args:
        attempt: of this program.
        outcome: an `Outcome` as text.
    """
    with suppress(OSError):
        attempt.released.write_text(outcome)


# Questions to a driver.


def ask_driver(attempt: AttemptFolder, question: Any, timeout_s: float) -> Any:
    """Return the answer of an attempt's driver to a question; None if it does not answer."""
    try:
        credentials = Credentials(attempt.token.read_text(), attempt.number)
        connection = connect_blocking(attempt.read_driver().address, timeout_s, "client", credentials)
    except (OSError, ValueError, PeerClosed):
        return None
    try:
        frames.send(connection, question, 1)
        while True:
            frame = frames.receive(connection)
            if frame.number == -1:
                return frame.message
    except (PeerClosed, TimeoutError):
        return None
    finally:
        connection.close()


def ask_role(attempt: AttemptFolder, role: str, question: Message, timeout_s: float) -> Any:
    """Return the answer of a role of the run, which the driver forwards; a string that says why there is none."""
    answer = ask_driver(attempt, Forward(role, bytes(encode_frame(question))), timeout_s)
    if isinstance(answer, Forwarded):
        return FrameDecoder().feed(answer.reply)[0].message
    return answer.text if isinstance(answer, Failed) else "its driver does not answer"


def driver_has_ended(attempt: AttemptFolder) -> bool:
    """Return whether the driver of an attempt is known to be gone; False if it was on another machine."""
    return has_ended(attempt.read_driver().process) is True


# Waiting for a former driver that does not answer.


def _wait_for_driver(former: AttemptFolder, note: DriverNote, log: Callable[[str], None]) -> None:
    """Return when the former driver has ended, or after `TAKEOVER_S` seconds without an answer.

    Raises:
        UsageError: it answers again.
    """
    driver = f"the former driver of {former.run} (process {pid_of(note.process)} on {note.host})"
    for waited_s in polls(TAKEOVER_POLL_S, TAKEOVER_S):
        if has_ended(note.process) is True:
            return
        if waited_s > 0 and isinstance(ask_driver(former, StatusRequest(), ANSWER_TIMEOUT_S), RunStatus):
            raise UsageError(f"another process is running in {former.run}, on {note.host}: it answers again")
        if waited_s < TAKEOVER_S:
            left_s = TAKEOVER_S - waited_s
            log(f"{driver} does not answer; its processes end themselves, and the run continues here in {left_s:.0f} s")


def _wait_for_processes(former: AttemptFolder, token: str) -> None:
    """Return when no process of the former driver is left on this machine.

    The guard of a forked member stands for the member, whose environment does not show the token.

    Raises:
        RunError: some are still there after `PROCESSES_TIMEOUT_S` seconds.
    """
    if not token:
        return
    for _ in polls(PROCESSES_POLL_S, PROCESSES_TIMEOUT_S):
        pids = sorted({*processes_with(TOKEN_VARIABLE, token), *running_guards(token)})
        if not pids:
            return
    raise RunError(
        f"processes of the former driver of {former.run} are still there after {PROCESSES_TIMEOUT_S:g} s: {pids}",
        hints=[f"end them with: kill -9 {' '.join(map(str, pids))}"],
    )
