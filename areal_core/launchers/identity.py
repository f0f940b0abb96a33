"""Who a process is, so that it is never taken for a later one of the same number."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def identify(pid: int) -> str:
    """A process of this machine: boot, namespace, number, moment of its start; words without spaces."""
    with suppress(OSError):
        return f"{_place()} {pid} {_fields(pid)[19]}"
    return f"{_place()} {pid} -"


def has_ended(identity: str) -> bool | None:
    """Whether the process of this identity has ended; None where that cannot be seen from here."""
    place, _, rest = identity.rpartition(" ")[0].rpartition(" ")
    if place != _place() or place.startswith("-"):
        return None
    with suppress(OSError):
        # One that has ended and that nobody has asked about yet keeps its number.
        return _fields(int(rest))[0] in "ZX" or identify(int(rest)) != identity
    return True


def processes_with(variable: str, value: str) -> list[int]:
    """Processes of this user that were started with an environment variable, this one left out."""
    entry, own = f"{variable}={value}".encode(), os.getpid()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if entry in path.read_bytes().split(b"\0") and (pid := int(path.parent.name)) != own:
                pids.append(pid)
    return pids


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process: first its state, as the 20th its start."""
    # The name in brackets in front of them may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _place() -> str:
    """This boot of this machine, and the process namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return "-"
