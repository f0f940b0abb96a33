"""Attempts of a run. A run belongs to whoever makes the next folder below `attempts/`; no lock file is trusted.

The folder is made whole beside its place and renamed, which succeeds for one of several. Whether a former driver lives
is asked of it: its address, host and process stand in its folder. One that does not answer and whose process is gone
from this host is taken over at once; one that cannot be seen from here after `TAKEOVER_S`. What a straggler writes
afterwards never counts: paths carry the attempt, and whoever commits looks first whether there is a later one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from areal_core.disk import sync_folder, sync_tree
from areal_core.errors import RunError, UsageError
from areal_core.launchers.identity import has_ended, identify, processes_with
from areal_core.messages import (
    Credentials,
    Failed,
    FrameDecoder,
    PeerClosed,
    connect_blocking,
    encode_frame,
    frames,
)
from areal_core.messages.hub import Driving, Forward, Forwarded, WhoDrives

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from areal_core.messages import Message
    from areal_core.runs.folder import AttemptFolder, RunFolder

ASK_TIMEOUT_S = 5.0
TAKEOVER_S = 60.0
"""After which a driver that does not answer and cannot be seen from here counts as gone: its processes have ended
themselves long before."""
COUNTDOWN_S = 10.0
GONE_TIMEOUT_S = 30.0
RECOVERING = "recovering"
"""Outcome of an attempt behind which the same program begins another one."""


@dataclass(frozen=True, slots=True)
class DriverNote:
    """Who drives an attempt.

    Attributes:
        address: of its hub.
        host: name of its machine.
        process: its identity there.
    """

    address: str
    host: str
    process: str


def claim(attempt: AttemptFolder, address: str, credentials: Credentials) -> None:
    """Make an attempt this process's own.

    Raises:
        UsageError: somebody else was quicker.
    """
    note = DriverNote(address, socket.gethostname(), identify(os.getpid()))
    made = attempt.path.with_name(f".{attempt.path.name}-{os.getpid()}-{socket.gethostname()}")
    try:
        attempt.run.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts, answers and weights are the user's alone
        made.mkdir(parents=True, exist_ok=True)
        (made / attempt.driver.name).write_text(json.dumps(asdict(note)))
        descriptor = os.open(made / attempt.token.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(credentials.token)
        sync_tree(made)
        made.rename(attempt.path)
    except OSError as error:
        if attempt.path.exists():
            raise UsageError(f"another process has just begun to run in {attempt.run}") from None
        raise UsageError(f"the run folder {attempt.run} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # a run that never began leaves nothing
            attempt.path.parent.rmdir()
            attempt.run.rmdir()
    sync_folder(attempt.path.parent)


def release(attempt: AttemptFolder, outcome: str = "") -> None:
    """The driver ends in order: whoever comes next need not ask; where the disk refuses this, they ask."""
    with suppress(OSError):
        attempt.released.write_text(outcome)


def exit_code_of(attempt: AttemptFolder) -> int | None:
    """The exit code of a run whose driver has ended in order; None where it has not, or goes on with a new attempt."""
    outcome = attempt.outcome
    if outcome is None or outcome.word == RECOVERING:
        return None
    return 0 if outcome.word == "done" else outcome.exit_code or 1


def next_attempt(run: RunFolder, log: Callable[[str], None]) -> AttemptFolder:
    """The attempt to claim, once the former driver is known to be gone.

    Args:
        run: the folder.
        log: told what is waited for.

    Raises:
        UsageError: the run has a driver.
    """
    former = run.last_attempt
    if former is None:
        return run.attempt(1)
    require_no_driver(run)
    if not former.released.exists():
        _wait_for_end(former, log)
    return run.attempt(former.number + 1)


def require_no_driver(run: RunFolder) -> None:
    """Raise `UsageError` where the driver of the latest attempt answers."""
    former = run.last_attempt
    if former is None or former.released.exists():
        return
    answer = ask_driver(former, WhoDrives(), ASK_TIMEOUT_S)
    if isinstance(answer, Driving):
        raise UsageError(
            f"another process is running in {former.run}: process {answer.pid} on {answer.host}",
            hints=["wait for it, or choose another run_dir=PATH"],
        )


def ask_driver(attempt: AttemptFolder, question: Any, timeout_s: float) -> Any:
    """Ask the driver of an attempt something; None where nobody answers."""
    try:
        note, token = read_note(attempt)
        shown = Credentials(token, attempt.number)
        connection = connect_blocking(note.address, timeout_s, "client", shown)
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
    """Ask a role of the run something through its driver: the reply, or in words why there is none."""
    answer = ask_driver(attempt, Forward(role, bytes(encode_frame(question))), timeout_s)
    if isinstance(answer, Forwarded):
        return FrameDecoder().feed(answer.reply)[0].message
    return answer.text if isinstance(answer, Failed) else "its driver does not answer"


def driver_has_ended(attempt: AttemptFolder) -> bool:
    """Whether the driver of an attempt is known to be gone; False where that cannot be seen from here."""
    return has_ended(read_note(attempt)[0].process) is True


def read_note(attempt: AttemptFolder) -> tuple[DriverNote, str]:
    """The driver of an attempt and the run's token; both are there whole as soon as the attempt's folder is."""
    return DriverNote(**json.loads(attempt.driver.read_text())), attempt.token.read_text()


def _wait_for_end(former: AttemptFolder, log: Callable[[str], None]) -> None:
    """Return once the driver of an attempt, which does not answer, can do no harm any more."""
    note, token = read_note(former)
    deadline = time.monotonic() + TAKEOVER_S
    while has_ended(note.process) is not True and (left := deadline - time.monotonic()) > 0:
        log(
            f"the former driver of {former.run} ({note.process.split()[-2]} on {note.host}) does not answer; its "
            f"processes end by themselves, and the run goes on here in {left:.0f} s"
        )
        time.sleep(min(COUNTDOWN_S, left))
        if isinstance(ask_driver(former, WhoDrives(), ASK_TIMEOUT_S), Driving):
            raise UsageError(f"another process is running in {former.run}, on {note.host}: it answers again")
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while token and (pids := processes_with("AREAL_TOKEN", token)):  # guards end them, within moments
        if time.monotonic() > deadline:
            raise RunError(
                f"processes of the former driver of {former.run} are still there after {GONE_TIMEOUT_S:g} s: {pids}",
                hints=[f"end them with: kill -9 {' '.join(map(str, pids))}"],
            )
        time.sleep(0.02)
