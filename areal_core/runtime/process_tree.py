"""Processes of this machine: what identifies one, which descendants it has, and how to kill all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of this process instead of init's."""
_REAP_POLL_S = 0.005
"""Seconds between checks whether killed children have ended."""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants that lose theirs, also in sessions of their own."""
    with suppress(AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int | str = "self") -> list[int]:
    """Return the children of a process, whichever of its threads started them. Zombies are among them."""
    pids: list[int] = []
    with suppress(OSError):  # the process may end while this reads
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (thread / "children").read_text().split())
    return pids


def kill_children(kept: frozenset[int] = frozenset()) -> set[int]:
    """Kill the children of this process and reap those that have ended, without waiting for any.

    After `adopt_orphans`, the death of a child makes its children ours, so call this until it returns nothing.

    Args:
        kept: children to leave alone.

    Returns:
        Killed children that have not ended yet. One in an uninterruptible system call may take long.
    """
    remaining: set[int] = set()
    skipped = set(kept)
    while pids := set(children()) - skipped - remaining:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # another thread has reaped it
                continue
            except PermissionError:  # it has become another user's
                skipped.add(pid)
                continue
            if not _reap(pid):
                remaining.add(pid)
    return remaining


def end_descendants() -> None:
    """Kill all children of this process, and their orphans, and wait until they have ended."""
    while kill_children():
        time.sleep(_REAP_POLL_S)


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants. Parents come first, so that none restarts a dead child.

    Processes that have ended, or belong to another user, are skipped.

    Example:
        >>> import subprocess
        >>> from areal_core.processes import kill_tree
        >>> process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
        >>> kill_tree(process.pid)
        >>> process.wait()
        -9
    """
    tree = [pid]
    for parent in tree:
        tree += children(parent)
    for member in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started with `start_new_session`, with all processes that it has started, and wait.

    Call this also if the process has ended, as soon as that is known: its processes may still run. Descendants that
    have left the session are found only while the process lives.
    """
    if process.poll() is None:
        kill_tree(process.pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def identify(pid: int) -> str:
    """Return an identifier that no other process shares, past or future: boot id, pid namespace, pid, start time.

    A pid alone is not enough, because the kernel gives it to later processes.
    """
    with suppress(OSError):
        return f"{_boot_and_namespace()} {pid} {_stat_fields(pid)[19]}"
    return f"{_boot_and_namespace()} {pid} -"


def has_ended(identity: str) -> bool | None:
    """Return whether the process of an identity has ended; None if it ran elsewhere and cannot be seen from here."""
    machine, _, pid = identity.rpartition(" ")[0].rpartition(" ")
    if machine != _boot_and_namespace() or machine.startswith("-"):
        return None
    with suppress(OSError):
        is_zombie = _stat_fields(int(pid))[0] in "ZX"  # a zombie keeps its pid
        return is_zombie or identify(int(pid)) != identity
    return True


def pid_of(identity: str) -> int:
    """Return the pid in an identity."""
    return int(identity.split()[-2])


def processes_with(variable: str, value: str) -> list[int]:
    """Return the user's processes that were executed with an environment variable, without this process.

    The kernel shows the environment that a program was executed with. A fork of the fork server is not found, because
    it sets its variables later; `guard.running_guards` finds its guard.
    """
    entry = f"{variable}={value}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with suppress(OSError):
            if entry in path.read_bytes().split(b"\0") and pid != os.getpid():
                pids.append(pid)
    return pids


def _reap(pid: int) -> bool:
    """Take the exit code of a child if it has ended; return whether it has."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # another thread has reaped it
        return True


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` behind the name: the state is the first, the start time the 20th."""
    # The name stands in parentheses and may contain any character.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot_and_namespace() -> str:
    """Return this boot of this machine and the pid namespace; "-" if they cannot be read."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return "-"
