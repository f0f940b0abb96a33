"""What the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import sys


def say(text: str = "") -> None:
    """Write one line (or several) of result."""
    sys.stdout.write(f"{text}\n")


def complain(text: str) -> None:
    """Write an error or a warning, under the name of the program; a terminal that is gone hears nothing."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.write(f"areal: {text}\n")
