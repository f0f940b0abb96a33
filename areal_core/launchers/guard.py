"""The guard of members: adopts what they leave behind, and ends it, so that a closed connection means: nothing is left.

A guard is the parent of a member. It holds a copy of the member's connection to the driver's hub and does nothing but
wait: until the member ends, or the hub hangs up. Then it kills the member and everything that it ever started, tells
the hub how the member ended, and only then lets the connection close. It also bounds the member's log.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.launchers.identity import has_ended, identify
from areal_core.messages import Credentials, PeerClosed, connect_blocking, frames, socket_parent
from areal_core.messages.hub import Ended

if TYPE_CHECKING:
    import socket

LOG_BYTES = 1 << 26
"""Of a log file, of which there may be two."""
LAST_BYTES, LAST_LINES = 4000, 15
"""Of a log, in what is told of a process that has ended."""
LOOK_S = 1.0
REPORT_TIMEOUT_S = 5.0
MEMORY = Path("/dev/shm")
SCRATCH_VARIABLE = "AREAL_SCRATCH"
"""Names a private folder of the member for sockets and weights, in memory where the machine offers that."""
HUB_VARIABLE = "AREAL_HUB"
_SET_CHILD_SUBREAPER = 36
_OWNER = "owner"


def adopt_orphans() -> None:
    """From now on what descendants of this process leave behind becomes its own."""
    with suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int | str = "self") -> list[int]:
    """Of this process or another, whichever thread has started them."""
    found: list[int] = []
    with suppress(OSError):  # the process, or one of its threads, may end while this reads
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def end_descendants(kept: frozenset[int] = frozenset()) -> None:
    """Kill the children of this process, to which orphans come, until there are none but those to be kept."""
    others: set[int] = set()
    while pids := set(children()) - kept - others:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # it has become another user's
                others.add(pid)
        for pid in pids - others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, parents first: none of them hears that its child has died."""
    tree = [pid]
    for each in tree:
        tree += children(each)
    for each in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def open_log(path: Path) -> None:
    """Have what this process writes go to a log, of the user alone: some programs write their keys into their logs."""
    with suppress(OSError):  # a disk that is full costs the log, and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)


def bound_log(path: Path, limit: int = LOG_BYTES) -> None:
    """A log that is full is begun anew; the last of what it held stays as `NAME.1`."""
    with suppress(OSError):
        if (size := path.stat().st_size) > limit:
            with path.open("rb") as full, path.with_name(f"{path.name}.1").open("wb") as kept:
                os.sendfile(kept.fileno(), full.fileno(), size - limit, limit)
            os.truncate(path, 0)


def timeline_of(log: Path) -> Path:
    """The file beside a process's log for when it did what: a JSON line each."""
    return log.with_suffix(".jsonl")


def last_words(log: Path) -> str:
    """The last lines of a log."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    return ""


def make_scratch() -> Path:
    """A new private folder, in memory where that takes one; those of guards that were killed are removed first."""
    with suppress(OSError):  # there is none, or it is read-only, full or another user's
        return _scratch_below(MEMORY)
    return _scratch_below(socket_parent())


def _scratch_below(parent: Path) -> Path:
    for former in parent.glob("areal-scratch-*"):
        with suppress(OSError):
            if has_ended((former / _OWNER).read_text()):
                shutil.rmtree(former)
    folder = Path(tempfile.mkdtemp(prefix="areal-scratch-", dir=parent))
    try:
        (folder / _OWNER).write_text(identify(os.getpid()))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


@dataclass
class Guarded:
    """A member below its guard.

    Attributes:
        pid: of the member.
        connection: a copy of its connection to the hub.
        hub, credentials: where its last word goes, and what is shown there.
        group, index: see `Join`.
        log: what it writes; None where somebody else keeps that.
        scratch: its private folder.
    """

    pid: int
    connection: socket.socket
    hub: str
    credentials: Credentials
    group: str
    index: int
    log: Path | None
    scratch: Path


class Guard:
    """Waits for members, and ends what is left of them."""

    def __init__(self) -> None:
        self._members: dict[int, Guarded] = {}
        self._poll = select.poll()

    def listen(self, file: int) -> None:
        """Have `wait` return where something arrives here."""
        self._poll.register(file, select.POLLIN)

    def add(self, member: Guarded) -> None:
        """Guard a child of this process."""
        pidfd = os.pidfd_open(member.pid)
        self._members[pidfd] = member
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(member.connection, select.POLLRDHUP)

    def wait(self) -> tuple[set[int], dict[int, int]]:
        """Until something happens, a second at most.

        Returns:
            The files that have something, and the exit codes of members that have ended, by their process ids.
        """
        ready = {file for file, _ in self._poll.poll(LOOK_S * 1000)}
        ended = {}
        for pidfd, member in list(self._members.items()):
            if pidfd in ready:
                ended[member.pid] = self._end(pidfd, member)
            elif member.connection.fileno() in ready:
                self._kill(pidfd, member)
            elif member.log is not None:
                bound_log(member.log)
                bound_log(timeline_of(member.log))
        return ready, ended

    def forget(self) -> None:
        """In a member that was just forked: close what is others', for their connections would outlive them here."""
        for pidfd, member in self._members.items():
            os.close(pidfd)
            member.connection.close()
        self._members.clear()

    def end_all(self) -> None:
        """End every member."""
        members = list(self._members.items())
        for pidfd, member in members:
            self._kill(pidfd, member)
        for pidfd, member in members:
            self._end(pidfd, member)

    def _kill(self, pidfd: int, member: Guarded) -> None:
        """Send SIGKILL. A member in an uninterruptible system call of a driver or a disk ends later, if ever, and the
        others are guarded meanwhile."""
        with suppress(KeyError):  # it was killed before
            self._poll.unregister(member.connection)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _end(self, pidfd: int, member: Guarded) -> int:
        """Wait for a member that has ended or was killed, end what it left behind, and tell the hub."""
        del self._members[pidfd]
        self._poll.unregister(pidfd)
        with suppress(KeyError):  # it was killed before
            self._poll.unregister(member.connection)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        end_descendants(frozenset(other.pid for other in self._members.values()))
        shutil.rmtree(member.scratch, ignore_errors=True)
        with suppress(OSError, PeerClosed):
            last = connect_blocking(member.hub, REPORT_TIMEOUT_S, "guard", member.credentials)
            frames.send(last, Ended(member.group, member.index, member.pid, code), 1)
            frames.receive(last)
            last.close()
        member.connection.close()
        return code
