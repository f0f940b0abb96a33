"""Who owns a run. A run is owned by whoever creates the next folder below `epochs/`; no lock file is trusted.

The folder is made whole beside its place and renamed, which succeeds for one of several. Whether a former owner lives
is asked of it: its address, host and process stand in its folder. One that does not answer and whose process is gone
from this host is no owner any more, at once; one that cannot be seen from here is waited for as long as its wardens may
go on without it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from areal_core.disk import sync_folder, sync_tree
from areal_core.errors import RunError, UsageError
from areal_core.launchers.identity import has_ended, identify, processes_with
from areal_core.launchers.wardens import LEASE_S, MARGIN_S
from areal_core.messages import BlockingChannel, ChannelClosed, Credentials
from areal_core.messages.processes import Owner, WhoOwns

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from areal_core.runs.folder import EpochFolder, RunFolder

ASK_TIMEOUT_S = 5.0
COUNTDOWN_S = 10.0
GONE_TIMEOUT_S = 30.0
RECOVERING = "recovering"
"""Outcome of an epoch behind which the same program begins another one."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns an epoch.

    Attributes:
        address: of the supervisor.
        host: name of its machine.
        process: its identity there.
    """

    address: str
    host: str
    process: str


_UNKNOWN = Ownership("", "a host that its damaged files do not name", "- ? -")
"""Of an epoch whose files cannot be read: waited for as one that cannot be seen from here."""


def claim(epoch: EpochFolder, address: str, credentials: Credentials) -> None:
    """Make an epoch this process's own.

    Raises:
        UsageError: somebody else was quicker.
    """
    owner = Ownership(address, socket.gethostname(), identify(os.getpid()))
    made = epoch.path.with_name(f".{epoch.path.name}-{os.getpid()}-{socket.gethostname()}")
    try:
        made.mkdir(parents=True, exist_ok=True)
        (made / epoch.owner.name).write_text(json.dumps(asdict(owner)))
        descriptor = os.open(made / epoch.token.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(credentials.token)
        sync_tree(made)
        made.rename(epoch.path)
    except OSError as error:
        if epoch.path.exists():
            raise UsageError(f"another process has just begun to run in {epoch.run}") from None
        raise UsageError(f"the run folder {epoch.run} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # a run that never began leaves nothing
            epoch.path.parent.rmdir()
            epoch.run.rmdir()
    sync_folder(epoch.path.parent)


def release(epoch: EpochFolder, outcome: str = "") -> None:
    """The owner ends in order: whoever comes next need not ask; where the disk refuses this, they ask."""
    with suppress(OSError):
        epoch.released.write_text(outcome)


def exit_code_of(epoch: EpochFolder) -> int | None:
    """The exit code of a run whose owner has ended in order; None where it has not, or goes on with a new epoch."""
    try:
        outcome, _, more = epoch.released.read_text(errors="replace").partition(" ")
    except OSError:
        return None
    if outcome in ("", RECOVERING):  # nothing: it is just being written
        return None
    _, _, code = more.partition(" ")
    return 0 if outcome == "done" else int(code) if code.isdecimal() else 1


def next_epoch(run: RunFolder, say: Callable[[str], None]) -> EpochFolder:
    """The epoch to claim, once the former owner is known to be gone.

    Args:
        run: the folder.
        say: told what is waited for.

    Raises:
        UsageError: the run has an owner.
    """
    former = run.last_epoch
    if former is None:
        return run.epoch(1)
    if not former.released.exists():
        _wait_for_end(former, say)
    return run.epoch(former.number + 1)


def ask_owner(epoch: EpochFolder, question: Any, timeout_s: float) -> Any:
    """Ask the supervisor that owns an epoch something; None where nobody answers."""
    try:
        owner, token = read_owner(epoch)
        credentials = Credentials(token, epoch.number)
        channel = BlockingChannel.connect(owner.address, timeout_s, "visitor", credentials, is_patient=False)
    except (OSError, ValueError):
        return None
    try:
        number = channel.send_request(question)
        deadline = time.monotonic() + timeout_s
        while True:
            frame = channel.receive(max(0.0, deadline - time.monotonic()))
            if frame.number == -number:
                return frame.message
    except (ChannelClosed, TimeoutError):
        return None
    finally:
        channel.close()


def owner_has_ended(epoch: EpochFolder) -> bool:
    """Whether the owner of an epoch is known to be gone; False where that cannot be seen from here."""
    return has_ended(read_owner(epoch)[0].process) is True


def is_over(run: RunFolder) -> bool:
    """Whether a run has ended, as far as its folder and this machine's processes say."""
    epoch = run.last_epoch
    return epoch is not None and (exit_code_of(epoch) is not None or owner_has_ended(epoch))


def read_owner(epoch: EpochFolder) -> tuple[Ownership, str]:
    """The owner of an epoch and the run's token; where the files are damaged, an owner that nothing is known of."""
    try:
        owner = Ownership(**json.loads(epoch.owner.read_text()))
        _, process, _ = owner.process.rsplit(" ", 2)
        return owner if process.isdecimal() else _UNKNOWN, epoch.token.read_text()
    except (OSError, ValueError, TypeError, AttributeError):
        return _UNKNOWN, ""


def _wait_for_end(former: EpochFolder, say: Callable[[str], None]) -> None:
    """Until the owner of an epoch can do no harm any more."""
    answer = ask_owner(former, WhoOwns(), ASK_TIMEOUT_S)
    if isinstance(answer, Owner):
        raise UsageError(
            f"another process is running in {former.run}: process {answer.pid} on {answer.host}",
            hints=["wait for it, or choose another run_dir=PATH"],
        )
    owner, token = read_owner(former)
    deadline = time.monotonic() + LEASE_S + MARGIN_S
    while has_ended(owner.process) is not True and (left := deadline - time.monotonic()) > 0:
        say(
            f"the former owner of {former.run} ({owner.process.split()[-2]} on {owner.host}) does not answer; its "
            f"processes end by themselves, and the run goes on here in {left:.0f} s"
        )
        time.sleep(min(COUNTDOWN_S, left))
        if isinstance(ask_owner(former, WhoOwns(), ASK_TIMEOUT_S), Owner):
            raise UsageError(f"another process is running in {former.run}, on {owner.host}: it answers again")
    _wait_for_processes(former, token)


def _wait_for_processes(former: EpochFolder, token: str) -> None:
    """Until no process of the epoch is left on this host: wardens end them, within moments."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while token and (pids := processes_with("AREAL_TOKEN", token)):
        if time.monotonic() > deadline:
            raise RunError(
                f"processes of the former owner of {former.run} are still there after {GONE_TIMEOUT_S:g} s: {pids}",
                hints=[f"end them with: kill -9 {' '.join(map(str, pids))}"],
            )
        time.sleep(0.02)
