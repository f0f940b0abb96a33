"""The guard: the parent of members, which kills what they leave behind.

    guard                        started by a launcher (or the fork server); copy 1 of the connection to the hub
      +-- member                 forked by the guard; copy 2 of the connection; joins the hub and does the work
            +-- child            a server, a reward, a tool, ...
                  +-- child

The guard opens the connection and forks the member, so both have a copy, and the connection is closed only when both
copies are. The guard closes its copy last, when the whole tree below it is gone. For the hub, a closed connection
therefore means: nothing is left of this member.

Guard and member are subreapers: a process whose parent dies becomes a child of the next subreaper above it, also if it
runs in a session of its own. So each of them finds what the other one leaves behind:

    dies     noticed by                                   what happens
    hub      guard: POLLRDHUP on the connection           kills the member; the rest as below
             member: end of the connection                kills its descendants, and exits
    member   guard: pidfd of its child                    reaps it, kills its orphans, removes its scratch folder,
                                                          reports its exit code to the hub over a new connection
                                                          (`ExitReport`), and closes the connection
    guard    member: pidfd of its parent                  kills its descendants, and exits

To end a member, the hub half-closes the connection, which looks to the guard as if the hub had died. Something is left
in two cases: guard and member are killed at the same moment, or the member has started a process of another user,
which neither of them may kill.

`fork_below_guard` makes the calling process the guard of one member. The fork server is the guard of all the members
that it forks. A guard is a loop of one thread, and waits for no process that it kills: a member or an orphan that hangs
in a system call of a driver or a disk ends late, if ever, and the other members are guarded all the same.

The loop waits only for the hub. If the hub's machine does not answer, the other members are guarded late:

    `Guarded.connect`          before a fork, up to `CONNECT_TIMEOUT_S`
    `Guarded.report_exit`      after each end of a member, up to `REPORT_TIMEOUT_S` twice: to connect, and for the reply
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from areal_core.disk import open_private
from areal_core.runtime import frames
from areal_core.runtime.environment import (
    CONNECTION_VARIABLE,
    GUARD_VARIABLE,
    HUB_VARIABLE,
    SCRATCH_VARIABLE,
    MemberPlace,
    member_place,
)
from areal_core.runtime.logs import bound_log, member_log, open_log, timeline_of
from areal_core.runtime.messages import ExitReport
from areal_core.runtime.process_tree import adopt_orphans, has_ended, identify, kill_children, pid_of
from areal_core.runtime.rpc import Credentials, PeerClosed, connect_blocking, socket_parent

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

CONNECT_TIMEOUT_S = 60.0
"""Seconds in which the hub must accept a connection, and then its member."""
REPORT_TIMEOUT_S = 5.0
"""Seconds in which the hub must take an exit report. Without one it reports the member as lost."""
CHECK_INTERVAL_S = 1.0
"""Seconds between checks of the logs' sizes."""
SWEEP_INTERVAL_S = 0.01
"""Seconds between checks whether killed processes have ended."""
MEMORY = Path("/dev/shm")
"""The file system in memory, for scratch folders."""
_OWNER = "owner"
"""Name of the file in a scratch folder that identifies its guard."""
_TOKEN = "token"
"""Name of the file in a scratch folder that holds the token of its run."""
_SCRATCH_FOLDERS = "areal-scratch-*"
"""Pattern of the names of scratch folders."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a guard does not die of, for the driver decides when its member ends."""


def make_scratch(token: str = "") -> Path:
    """Make a private folder, in memory if possible. Remove the folders of guards that were killed.

    Args:
        token: of the run that the folder is for, by which `running_guards` finds this process. Empty outside a run.
    """
    with suppress(OSError):  # there is no such file system, or it is read-only, full, or another user's
        return _make_scratch_in(MEMORY, token)
    return _make_scratch_in(socket_parent(), token)


def running_guards(token: str) -> list[int]:
    """Return the process ids of a run's guards on this machine. A guard runs until nothing is left of its members.

    Their scratch folders show them. The folders of other users cannot be read, and those of guards in other
    containers are ignored.

    Args:
        token: of the run.
    """
    pids: set[int] = set()
    for parent in (MEMORY, socket_parent()):
        for folder in parent.glob(_SCRATCH_FOLDERS):
            with suppress(OSError):  # another user's folder, or one that is just removed
                if (folder / _TOKEN).read_bytes() != token.encode():
                    continue
                owner = (folder / _OWNER).read_text()
                if has_ended(owner) is False:
                    pids.add(pid_of(owner))
    return sorted(pids)


def _make_scratch_in(parent: Path, token: str) -> Path:
    for former in parent.glob(_SCRATCH_FOLDERS):
        with suppress(OSError):
            if has_ended((former / _OWNER).read_text()):
                shutil.rmtree(former)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_FOLDERS.rstrip("*"), dir=parent))
    try:
        if token:
            with open_private(folder / _TOKEN, "w") as file:
                file.write(token)
        (folder / _OWNER).write_text(identify(os.getpid()))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


@dataclass(eq=False)
class Guarded:
    """A member below its guard.

    Attributes:
        place: which member it is.
        hub: address of the hub.
        credentials: shown to the hub.
        connection: the guard's copy of the connection to the hub.
        scratch: the member's private folder.
        log: the file that it writes; None if the launcher keeps its output.
        pid: its process id; 0 before it is forked.
        code: its exit code; None while it runs. A member with an exit code has no process id any more: the kernel may
            give `pid` to another process.
        orphans: processes that it has left behind, which were killed and have not ended yet.
    """

    place: MemberPlace
    hub: str
    credentials: Credentials
    connection: socket.socket
    scratch: Path
    log: Path | None
    pid: int = 0
    code: int | None = None
    orphans: set[int] = field(default_factory=set)

    @classmethod
    def connect(cls, environment: Mapping[str, str]) -> Guarded:
        """Connect to the hub for a member that is to be forked.

        Args:
            environment: of the member, from its launcher.

        Raises:
            OSError: the hub cannot be reached, or there is no room for the scratch folder.
            PeerClosed: the hub has closed the connection.
        """
        place = member_place(environment)
        hub = environment[HUB_VARIABLE]
        credentials = Credentials.from_variables(environment)
        connection = connect_blocking(hub, CONNECT_TIMEOUT_S, "member", credentials)
        scratch = make_scratch(credentials.token)
        return cls(place, hub, credentials, connection, scratch, member_log(environment, place.name))

    def variables(self) -> dict[str, str]:
        """Return the variables that the guard adds to the member's environment."""
        return {
            CONNECTION_VARIABLE: str(self.connection.fileno()),
            GUARD_VARIABLE: str(os.getpid()),
            SCRATCH_VARIABLE: str(self.scratch),
        }

    def report_exit(self) -> None:
        """Send the exit code to the hub, and wait until it has taken it. Do nothing if the hub is gone."""
        assert self.code is not None
        report = ExitReport(self.place.group, self.place.index, self.place.start, self.code)
        with suppress(OSError, PeerClosed):
            connection = connect_blocking(self.hub, REPORT_TIMEOUT_S, "guard", self.credentials)
            frames.send(connection, report, 1)
            frames.receive(connection)
            connection.close()


class Guard:
    """Guards members that this process has forked. It has one thread, and the process calls `wait` in a loop."""

    def __init__(self) -> None:
        self._running: dict[int, Guarded] = {}
        """Members by their pidfds."""
        self._leaving: list[Guarded] = []
        """Members that have ended, and whose orphans have not."""
        self._poll = select.poll()

    def listen(self, file: int) -> None:
        """Let `wait` return when a file can be read."""
        self._poll.register(file, select.POLLIN)

    def ignore(self, file: int) -> None:
        """Undo `listen`."""
        self._poll.unregister(file)

    def fork(self, member: Guarded) -> int:
        """Fork a member and guard it.

        Returns:
            0 in the member, whose copies of other members' connections are closed, and its process id in the guard.
        """
        pid = os.fork()
        if not pid:
            for pidfd, other in self._running.items():
                os.close(pidfd)
                other.connection.close()
            for other in self._leaving:
                other.connection.close()
            return 0
        member.pid = pid
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = member
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(member.connection, select.POLLRDHUP)
        return pid

    def send_signal(self, member: Guarded, number: int) -> None:
        """Send a signal to a member. Do nothing if it has ended, because its pid may be another process's by now."""
        for pidfd, running in self._running.items():
            if running is member:
                with suppress(ProcessLookupError):  # it is just ending
                    signal.pidfd_send_signal(pidfd, number)

    def wait(self) -> tuple[set[int], list[Guarded]]:
        """Wait until something happens, or for one second, and act on it.

        Returns:
            The files that can be read, and the members of which nothing is left any more, with their exit codes.
        """
        timeout_s = SWEEP_INTERVAL_S if self._leaving else CHECK_INTERVAL_S
        ready = {file for file, _ in self._poll.poll(timeout_s * 1000)}
        for pidfd, member in list(self._running.items()):
            if pidfd in ready:
                self._reap(pidfd, member)
            elif member.connection.fileno() in ready:
                self._kill(pidfd, member)
            elif member.log is not None:
                bound_log(member.log)
                bound_log(timeline_of(member.log))
        return ready, self._sweep()

    def end_all(self) -> None:
        """Kill all members, and return when nothing is left of them."""
        for pidfd, member in self._running.items():
            self._kill(pidfd, member)
        while self._running or self._leaving:
            self.wait()

    def _kill(self, pidfd: int, member: Guarded) -> None:
        """Kill a member without waiting for its end."""
        self._ignore_connection(member)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _reap(self, pidfd: int, member: Guarded) -> None:
        """Take the exit code of a member that has ended. Its pidfd can be read, so this does not block."""
        del self._running[pidfd]
        self._poll.unregister(pidfd)
        self._ignore_connection(member)
        os.close(pidfd)
        _, status = os.waitpid(member.pid, 0)
        member.code = os.waitstatus_to_exitcode(status)
        self._leaving.append(member)

    def _sweep(self) -> list[Guarded]:
        """Kill what members that have ended left behind, and report those of which nothing is left.

        The kernel does not say whose orphan a process was. An orphan that was seen before belongs to the members that
        had ended by then, so that one that hangs does not delay the reports of later members.

        Returns:
            The members of which nothing is left.
        """
        if not self._leaving:
            return []
        seen = set[int]().union(*(member.orphans for member in self._leaving))
        remaining = kill_children(kept=frozenset(member.pid for member in self._running.values()))
        gone = []
        for member in self._leaving:
            member.orphans = remaining - (seen - member.orphans)
            if not member.orphans:
                gone.append(member)
        self._leaving = [member for member in self._leaving if member.orphans]
        for member in gone:
            shutil.rmtree(member.scratch, ignore_errors=True)
            member.report_exit()
            member.connection.close()
        return gone

    def _ignore_connection(self, member: Guarded) -> None:
        with suppress(KeyError):  # the member was killed before
            self._poll.unregister(member.connection)


def fork_below_guard() -> None:
    """Fork. The parent becomes the guard and never returns; the child returns, with the guard's variables.

    Call it first in a process: before threads, torch and CUDA, which do not survive a fork.
    """
    adopt_orphans()
    log = member_log(os.environ, member_place(os.environ).name)
    if log is not None:
        open_log(log)
    guard = Guard()
    member = Guarded.connect(os.environ)
    os.environ.update(member.variables())
    if guard.fork(member):
        _guard_one(guard, member)
    member.connection.detach()


def _guard_one(guard: Guard, member: Guarded) -> NoReturn:
    """Guard a member to its end, and exit with its code.

    Pass signals on. The member reports SIGTERM and SIGUSR1 to the driver, and ignores the others.
    """
    for number in SIGNALS:
        signal.signal(number, lambda number, _: guard.send_signal(member, number))
    gone: list[Guarded] = []
    while member not in gone:
        _, gone = guard.wait()
    assert member.code is not None
    os._exit(member.code if member.code >= 0 else 128 - member.code)
