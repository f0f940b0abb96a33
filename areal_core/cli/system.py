"""Check once, before any command runs, that the operating system has what areal uses to stop the processes of a run.

A guard waits for its children with pidfd, adopts orphaned processes with prctl and finds descendants below /proc. All
three exist on Linux only, also inside WSL2.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from areal_core.errors import ArealError

_ADVICE = {
    "darwin": "this is macOS: use a Linux machine",
    "win32": "this is Windows: use WSL2, which is Linux",
}


def check_system() -> None:
    """Return if this system can run areal.

    Raises:
        ArealError: the system is not Linux, or it lacks pidfd, prctl or /proc.
    """
    if sys.platform != "linux":
        advice = _ADVICE.get(sys.platform, f"this is {sys.platform}: use a Linux machine")
        raise ArealError(f"areal runs on Linux only, and {advice}")
    if cause := _missing_feature():
        raise ArealError(f"areal stops the processes of a run with pidfd, prctl and /proc, and {cause}")


def _missing_feature() -> str:
    """Return what this Linux system lacks and how to get it; empty if nothing is missing."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return "this Python was built without pidfd: use one that was built on Linux 5.3 or newer"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this system refuses pidfd ({error.strerror}): use Linux 5.3 or newer"
    if not hasattr(ctypes.CDLL(None), "prctl"):
        return "the C library of this Python has no prctl: use a Python for Linux"
    try:
        Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"/proc cannot be read here ({error.strerror}): mount it"
    return ""
