"""Processes that end with their parent, and how to say why one ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies (Linux; elsewhere sockets tell).

    Args:
        parent: the parent's process id, to notice that it died before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log file, for an error message; empty where there is none."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def exit_description(code: int) -> str:
    """An exit code in words: `exit code 1`, `killed by SIGKILL`."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
