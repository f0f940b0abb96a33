"""What the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys

from areal_core.errors import RunError, let_go, printable, written_for


def print_out(text: str = "") -> None:
    """Write one line (or several) of result.

    Raises:
        RunError: it cannot be written.
        SystemExit: its reader has gone, who wants no more; the program ends quietly.
    """
    try:
        sys.stdout.write(written_for(sys.stdout, f"{text}\n"))
        sys.stdout.flush()
    except OSError as error:
        let_go(sys.stdout)
        if isinstance(error, BrokenPipeError):  # as in `areal plugins | head`
            raise SystemExit(1) from None
        hint = "send standard output to where there is room"
        raise RunError(f"the result cannot be written: {error.strerror}", hints=[hint]) from error


def print_error(text: str) -> None:
    """Write an error or a warning, under the name of the program; a terminal that is gone hears nothing."""
    try:
        sys.stderr.write(f"areal: {printable(text)}\n")
    except OSError:
        let_go(sys.stderr)
