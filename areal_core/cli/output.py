"""What the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import os
import select
import sys

from areal_core.errors import RunError, printable


def print_out(text: str = "") -> None:
    """Write one line (or several) of result.

    Raises:
        RunError: it cannot be written; a reader that has gone is a `BrokenPipeError`.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end of the program would try it again
        hint = "send standard output to where there is room"
        raise RunError(f"the result cannot be written: {error.strerror}", hints=[hint]) from error


def reader_is_gone() -> bool:
    """Whether nobody reads standard output any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are told unasked
    return bool(output.poll(0))


def print_error(text: str) -> None:
    """Write an error or a warning, under the name of the program; a terminal that is gone hears nothing."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"areal: {printable(text)}\n")
