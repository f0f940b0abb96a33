"""Keeps one process: `keeper.py LOG LIMIT -- COMMAND...`, standard library only, without areal.

Writes what the process says into LOG, never more than twice LIMIT bytes, and ends everything that the process ever
started when the process ends: orphans come to this program, whatever session they made for themselves. Its standard
input takes orders, a line each: `signal NUMBER`, `end SECONDS`. When standard input ends, whoever gave the orders is
gone, and so is the process. Its standard output tells in JSON lines the process's id, and at last how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

LAST_WORDS = 4000
POLL_S = 0.5
_SET_CHILD_SUBREAPER, _SET_PDEATHSIG = 36, 1


class BoundedLog:
    """A log file that is begun anew when it is full; the former one stays as `NAME.1`. Keeps the end in memory.

    A disk that is full, or a folder that is gone, costs lines of the log, and nothing else.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._tail = b""
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()

    def _open(self) -> IO[bytes]:
        """Of the user alone: some programs write their keys into their logs."""
        return os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append what the process has written."""
        self._tail = (self._tail + data)[-LAST_WORDS:]
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = self._open()
            if self._file.tell() + len(data) > self._limit:
                full, self._file = self._file, None  # whatever fails below, the next write opens it again
                full.close()
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._file = self._open()
            self._file.write(data)

    @property
    def last_words(self) -> str:
        """The last lines."""
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-15:])


def keep(log: BoundedLog, command: list[str]) -> None:
    """Start the command, follow it to its end, and tell."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # orders come by standard input
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare,  # noqa: PLW1509 - this program has one thread
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = f"cannot start {command[0]}: {error}"
        log.write(f"{words}\n".encode())
        _tell(code=127, last_words=words)
        return
    _tell(pid=process.pid)
    _follow(process, log, wake)
    _end_descendants()
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while data := _read(process.stdout.fileno()):
        log.write(data)
    _tell(code=process.returncode, last_words=log.last_words)


def _prepare() -> None:
    """In the process, before its program: what this one ignores it does not, and it does not outlive this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _follow(process: subprocess.Popen[bytes], log: BoundedLog, wake: int) -> None:
    """Until the process has ended: write its output, and do as standard input says."""
    assert process.stdout is not None
    output, deadline, listened = process.stdout.fileno(), None, [0, process.stdout.fileno(), wake]
    while process.poll() is None:
        if deadline is not None and time.monotonic() >= deadline:
            process.kill()
            deadline = None
        ready, _, _ = select.select(listened, [], [], POLL_S if deadline is None else 0.05)
        if wake in ready:
            _read(wake)
        if output in ready:
            data = _read(output)
            log.write(data)
            if not data:
                listened.remove(output)
        if 0 in ready:
            orders = _read(0)
            if not orders:
                listened.remove(0)
                orders = b"end 0"
            for order in orders.decode().splitlines():
                deadline = _obey(process, order.split(), deadline)


def _obey(process: subprocess.Popen[bytes], words: list[str], deadline: float | None) -> float | None:
    """Do as an order says; when the process is to be killed, None for never."""
    if words[0] == "signal":
        process.send_signal(int(words[1]))
        return deadline
    seconds = float(words[1])
    process.send_signal(signal.SIGTERM if seconds else signal.SIGKILL)
    return time.monotonic() + seconds if deadline is None else min(deadline, time.monotonic() + seconds)


def _end_descendants() -> None:
    """Orphans come to this process, so killing its children until there are none ends them all."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except (BlockingIOError, InterruptedError):
        return b""


def _tell(**facts: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    keep(BoundedLog(Path(sys.argv[1]), int(sys.argv[2])), sys.argv[4:])
