"""Write results to standard output, and everything else to standard error."""

from __future__ import annotations

import sys

from areal_core.errors import RunError, let_go, printable, written_for


def print_out(text: str = "") -> None:
    """Write one or several lines of a result.

    Raises:
        RunError: the lines cannot be written, for example because the disk is full.
        SystemExit: the reader of a pipe has exited. The program then exits without a message.

    Example:
        >>> import json
        >>> from areal_core.programs import print_out
        >>> print_out(json.dumps({"reward": 0.5}))
        {"reward": 0.5}
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
    """Write an error or a warning, with the name of the program. Do nothing if the terminal was closed.

    Example:
        >>> import contextlib
        >>> import sys
        >>> from areal_core.programs import print_error
        >>> with contextlib.redirect_stderr(sys.stdout):
        ...     print_error("interrupted after 12 of 100 episodes")
        areal: interrupted after 12 of 100 episodes
    """
    try:
        sys.stderr.write(f"areal: {printable(text)}\n")
    except OSError:
        let_go(sys.stderr)
