"""Write results to standard output, and everything else to standard error."""

from __future__ import annotations

import sys

from areal_core.errors import RunError, let_go, printable, written_for


def print_out(text: str = "") -> None:
    """Write one or several lines of a result.

    Raises:
        RunError: the lines cannot be written, for example because the disk is full.
        SystemExit: the reader of a pipe has exited. The program then exits without a message.
    """
    try:
        sys.stdout.write(written_for(sys.stdout, f"{text}\n"))
        sys.stdout.flush()
    except OSError as error:
        let_go(sys.stdout)
        if isinstance(error, BrokenPipeError):  # for example in `areal plugins | head`
            raise SystemExit(1) from None
        hint = "send standard output to where there is room"
        raise RunError(f"the result cannot be written: {error.strerror}", hints=[hint]) from error


def print_error(text: str) -> None:
    """Write an error or a warning, with the name of the program. Do nothing if the terminal was closed."""
    try:
        sys.stderr.write(f"areal: {printable(text)}\n")
    except OSError:
        let_go(sys.stderr)
